"""Masked attention."""

import math

from tvm import te, tirx

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.errors import UnsupportedError
from tir_kernels.problems.kind import Random, titled

PROBLEM, PARTS = AttentionProblem, (Layouts, View)


def sizes(problem: AttentionProblem) -> dict[str, int]:
    """Sequences, query heads, both lengths, and the size of a head."""
    return {name: getattr(problem, name) for name in ("batch", "q_heads", "q_len", "kv_len", "head_dim")}


def title(problem: AttentionProblem) -> str:
    """As "attention 1x12x128x128x64"."""
    return titled("attention", sizes(problem))


def tensors(problem: AttentionProblem) -> list[te.Tensor]:
    """q, k, v, [bias], [key_count], [sink], [prior, prior_lse], mask, out, [lse]; the output's block is called "out".

    The mask is bool (batch, q_heads, q_len, kv_len) here, whatever form the kernels read it in.  UnsupportedError for
    problems with positions or a block map, which no search tunes.
    """
    if problem.block_map is not None:
        raise UnsupportedError("attentions with a block map that is known at run time are not tuned")
    if problem.has_positions:
        raise UnsupportedError("attentions whose rows of the mask are known at run time are not tuned")
    scores_shape = problem.batch, problem.q_heads, problem.q_len, problem.kv_len
    q, k, v = (te.placeholder(problem.shape(name), problem.dtype, name=name) for name in "qkv")
    inputs = [q, k, v]
    bias = None
    if problem.bias_shape is not None:
        bias = te.placeholder(problem.bias_shape, problem.bias_dtype, name="bias")
        inputs.append(bias)
    key_count = None
    if problem.has_key_count:
        key_count = te.placeholder((problem.key_counts,), "int32", name="key_count")
        inputs.append(key_count)
    sink = None
    if problem.sink_dtype is not None:
        sink = te.placeholder((problem.q_heads,), problem.sink_dtype, name="sink")
        inputs.append(sink)
    prior = []
    if problem.continues:
        prior.append(te.placeholder(problem.shape("out"), problem.dtype, name="prior"))
        prior.append(te.placeholder(problem.lse_shape, "float32", name="prior_lse"))
    mask = te.placeholder(scores_shape, "bool", name="mask")
    scores = _scores(problem, q, k, bias, key_count, mask)
    out = _average(problem, scores, v, prior, sink)
    return [*inputs, *prior, mask, *out]


def draw(problem: AttentionProblem, random: Random) -> list:
    """All normal: q, k, v, [bias], [sink], [prior, prior_lse]; a key count after the bias keeps all keys."""
    specs = [(problem.shape(name), problem.dtype) for name in "qkv"]
    if problem.bias_shape is not None:
        specs.append((problem.bias_shape, problem.bias_dtype))
    if problem.sink_dtype is not None:
        specs.append(((problem.q_heads,), problem.sink_dtype))
    if problem.continues:
        specs += [(problem.shape("out"), problem.dtype), (problem.lse_shape, "float32")]
    drawn = [random.normal(shape, dtype) for shape, dtype in specs]
    if problem.has_key_count:
        counts = random.integers(1, (problem.key_counts,), "int32") + problem.kv_len
        drawn.insert(3 + (problem.bias_shape is not None), counts)
    return drawn


def reference(problem: AttentionProblem, inputs: list, torch, keep=None) -> list:
    """[out] or [out, lse] of q, k, v, [bias], [key_count], [sink], [prior, prior_lse].

    The mask `keep` broadcasts to (batch, heads, q_len, kv_len).  Batch entries are computed one after another, because
    the scores of all of them may not fit in memory.
    """
    if keep is None:
        keep = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=inputs[0].device)
    q, k, v = (_heads_first(problem, name, x) for name, x in zip("qkv", inputs))
    given = iter(inputs[3:])
    bias = next(given) if problem.bias_shape is not None else None
    counts = next(given) if problem.has_key_count else None
    sink = next(given) if problem.sink_dtype is not None else None
    outs, lses = [], []
    for i in range(problem.batch):
        entry = lambda x: x[i if len(x) > 1 else 0]
        scores = q[i] @ k[i].transpose(-1, -2) * problem.scale
        if problem.softcap is not None:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        if bias is not None:
            scores = scores + entry(bias).to(scores.dtype)
        scores = scores.masked_fill(~entry(keep), float("-inf"))
        if counts is not None:
            is_past = torch.arange(problem.kv_len, device=scores.device) >= counts[problem.key_count_index(i)]
            scores = scores.masked_fill(is_past, float("-inf"))
        if sink is not None:  # one more key, whose value is 0
            scores = torch.cat([scores, sink.to(scores.dtype)[:, None, None].expand(-1, problem.q_len, 1)], dim=-1)
        alive = (scores > float("-inf")).any(dim=-1, keepdim=True)
        weights = torch.where(alive, torch.softmax(scores, dim=-1), 0).to(v.dtype)
        outs.append(weights[..., : problem.kv_len] @ v[i])
        lses.append(scores.float().logsumexp(dim=-1))
    out, lse = torch.stack(outs), torch.stack(lses)
    if problem.continues:
        prior, prior_lse = given
        prior = prior.permute([problem.layouts.out.index(dimension) for dimension in "bhsd"])
        both = torch.logaddexp(lse, prior_lse.to(lse.dtype))
        shares = ((x - both).nan_to_num(neginf=float("-inf")).exp()[..., None] for x in (prior_lse, lse))
        out = sum(share * x for share, x in zip(shares, (prior, out))).to(out.dtype)
        lse = both
    out = out.permute(["bhsd".index(dimension) for dimension in problem.layouts.out])
    return [out, lse] if problem.gives_lse else [out]


def _heads_first(problem, operand: str, x):
    """(batch, q_heads, length, dim) of q, k or v in its layout."""
    layout = getattr(problem.layouts, operand)
    if isinstance(layout, View):
        strides = (layout.batch, layout.head, layout.token, 1)
        x = x.as_strided(problem.logical_shape(operand), strides, layout.offset)
    else:
        x = x.permute([layout.index(dimension) for dimension in "bhsd"])
    return x.repeat_interleave(problem.q_heads // x.shape[1], dim=1)


def _scores(problem, q, k, bias, key_count, mask) -> te.Tensor:
    """Scaled and perhaps capped scores with the bias; -inf where the mask keeps nothing."""
    d = te.reduce_axis((0, problem.head_dim), name="d")
    shape = tuple(mask.shape)

    def product(b, h, i, j):
        left = q[problem.index("q", b, h, i, d)].astype("float32")
        right = k[problem.index("k", b, h // problem.group, j, d)].astype("float32")
        return te.sum(left * right, axis=d)

    products = te.compute(shape, product, name="products")

    def score(b, h, i, j):
        if problem.softcap is None:
            value = products[b, h, i, j] * tirx.const(problem.scale, "float32")
        else:
            value = products[b, h, i, j] * tirx.const(problem.scale / problem.softcap, "float32")
            value = tirx.tanh(value) * tirx.const(problem.softcap, "float32")
        if bias is not None:
            value = value + bias[problem.bias_index(b, h, i, j)].astype("float32")
        keep = mask[b, h, i, j]
        if key_count is not None:
            keep = tirx.And(keep, j < key_count[problem.key_count_index(b)])
        return tirx.Select(keep, value, tirx.const(-math.inf, "float32"))

    return te.compute(shape, score, name="scores")


def _average(problem, scores, v, prior, sink) -> list[te.Tensor]:
    """[out] or [out, lse]: values weighted by the softmax of scores and sink, merged with a prior part's result."""
    rows, minus_inf, zero = problem.lse_shape, tirx.const(-math.inf, "float32"), tirx.const(0, "float32")
    j = te.reduce_axis((0, problem.kv_len), name="j")
    largest = te.compute(rows, lambda b, h, i: te.max(scores[b, h, i, j], axis=j), name="largest")

    def finite(b, h, i):
        """The maximum that exponents are taken from; 0 where nothing is kept."""
        value = tirx.max(largest[b, h, i], prior[1][b, h, i]) if prior else largest[b, h, i]
        value = value if sink is None else tirx.max(value, sink[h].astype("float32"))
        return tirx.Select(value == minus_inf, zero, value)

    shift = te.compute(rows, finite, name="shift")
    weights = te.compute(
        tuple(scores.shape), lambda b, h, i, j: tirx.exp(scores[b, h, i, j] - shift[b, h, i]), name="weights"
    )
    j = te.reduce_axis((0, problem.kv_len), name="j")
    total = te.compute(rows, lambda b, h, i: te.sum(weights[b, h, i, j], axis=j), name="total")
    j = te.reduce_axis((0, problem.kv_len), name="j")

    def weighted(b, h, i, d):
        value = v[problem.index("v", b, h // problem.group, j, d)].astype("float32")
        return te.sum(weights[b, h, i, j] * value, axis=j)

    values = te.compute((*rows, problem.v_head_dim), weighted, name="values")

    def with_prior(b, h, i):
        """The softmax's denominator, and the share of it that the prior part has."""
        share = tirx.exp(prior[1][b, h, i] - shift[b, h, i]) if prior else zero
        denominator = total[b, h, i] + share
        if sink is not None:
            denominator = denominator + tirx.exp(sink[h].astype("float32") - shift[b, h, i])
        return denominator, share

    def normalized(*index):
        b, h, i, d = (index[problem.layouts.out.index(name)] for name in "bhsd")
        denominator, share = with_prior(b, h, i)
        value = values[b, h, i, d]
        if prior:
            value = value + share * prior[0][problem.index("out", b, h, i, d)].astype("float32")
        return tirx.Select(denominator == zero, zero, value / denominator).astype(problem.dtype)

    outputs = [te.compute(problem.shape("out"), normalized, name="out")]
    if problem.gives_lse:
        lse = lambda b, h, i: tirx.log(with_prior(b, h, i)[0]) + shift[b, h, i]
        outputs.append(te.compute(rows, lse, name="lse"))
    return outputs
