"""The definition of masked attention as tensor expressions, by which MetaSchedule identifies a workload."""

import math

from tvm import te, tirx

from tir_kernels.attention.problem import AttentionProblem


def attention_tensors(problem: AttentionProblem) -> list[te.Tensor]:
    """q, k, v, [bias], [sink], [prior, prior_lse], mask, out, [lse]; the output's block is called "out".

    The mask is bool (batch, q_heads, q_len, kv_len) here, whatever form the kernels read it in.
    """
    scores_shape = problem.batch, problem.q_heads, problem.q_len, problem.kv_len
    q, k, v = (te.placeholder(problem.shape(name), problem.dtype, name=name) for name in "qkv")
    inputs = [q, k, v]
    bias = None
    if problem.bias_shape is not None:
        bias = te.placeholder(problem.bias_shape, problem.bias_dtype, name="bias")
        inputs.append(bias)
    sink = None
    if problem.sink_dtype is not None:
        sink = te.placeholder((problem.q_heads,), problem.sink_dtype, name="sink")
        inputs.append(sink)
    prior = []
    if problem.continues:
        prior.append(te.placeholder(problem.shape("out"), problem.dtype, name="prior"))
        prior.append(te.placeholder(problem.lse_shape, "float32", name="prior_lse"))
    mask = te.placeholder(scores_shape, "bool", name="mask")
    scores = _scores(problem, q, k, bias, mask)
    out = _average(problem, scores, v, prior, sink)
    return [*inputs, *prior, mask, *out]


def _scores(problem, q, k, bias, mask) -> te.Tensor:
    """Scaled scores with the bias; -inf where the mask keeps nothing."""
    d = te.reduce_axis((0, problem.head_dim), name="d")
    shape = tuple(mask.shape)

    def product(b, h, i, j):
        left = q[problem.index("q", b, h, i, d)].astype("float32")
        right = k[problem.index("k", b, h // problem.group, j, d)].astype("float32")
        return te.sum(left * right, axis=d)

    products = te.compute(shape, product, name="products")

    def score(b, h, i, j):
        value = products[b, h, i, j] * tirx.const(problem.scale, "float32")
        if bias is not None:
            value = value + bias[problem.bias_index(b, h, i, j)].astype("float32")
        return tirx.Select(mask[b, h, i, j], value, tirx.const(-math.inf, "float32"))

    return te.compute(shape, score, name="scores")


def _average(problem, scores, v, prior, sink) -> list[te.Tensor]:
    """[out] or [out, lse]: values weighted by the softmax of the scores and the sink, with a prior part's result."""
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
