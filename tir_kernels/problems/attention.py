"""Masked attention."""

from tvm import te

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.tuning.attention_compute import attention_tensors

PROBLEM, PARTS = AttentionProblem, (Layouts, View)


def tensors(problem: AttentionProblem) -> list[te.Tensor]:
    """As `attention_tensors`; the mask is an input."""
    return attention_tensors(problem)


def draw(problem: AttentionProblem, generator, device) -> list:
    """All normal: q, k, v, [bias], [sink], [prior, prior_lse]."""
    from tir_kernels.problems.pytorch import normal

    specs = [(problem.shape(name), problem.dtype) for name in "qkv"]
    if problem.bias_shape is not None:
        specs.append((problem.bias_shape, problem.bias_dtype))
    if problem.sink_dtype is not None:
        specs.append(((problem.q_heads,), problem.sink_dtype))
    if problem.continues:
        specs += [(problem.shape("out"), problem.dtype), (problem.lse_shape, "float32")]
    return [normal(shape, dtype, generator, device) for shape, dtype in specs]


def reference(problem: AttentionProblem, inputs: list, keep=None) -> list:
    """[out] or [out, lse] of q, k, v, [bias], [sink], [prior, prior_lse].

    The mask broadcasts to (batch, heads, q_len, kv_len).  One batch entry after the other: the scores of all at once
    may not fit in memory.
    """
    import torch

    if keep is None:
        keep = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=inputs[0].device)
    q, k, v = (_heads_first(problem, name, x) for name, x in zip("qkv", inputs))
    given = iter(inputs[3:])
    bias = next(given) if problem.bias_shape is not None else None
    sink = next(given) if problem.sink_dtype is not None else None
    outs, lses = [], []
    for i in range(problem.batch):
        entry = lambda x: x[i if len(x) > 1 else 0]
        scores = q[i] @ k[i].transpose(-1, -2) * problem.scale
        if bias is not None:
            scores = scores + entry(bias).to(scores.dtype)
        scores = scores.masked_fill(~entry(keep), float("-inf"))
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
