"""The operators of a template's problem in PyTorch, in the dtype of their inputs: what results are compared with."""

import torch
import torch.nn.functional as F

from tir_kernels.attention.problem import AttentionProblem, View
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, RowProblem
from tir_kernels.fusion.rows.embedding import EmbeddingProblem
from tir_kernels.fusion.rows.rotary import RotaryProblem

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def fusion_reference(problem, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a fusion problem, unfused; inputs and outputs in the order of the problem's arguments."""
    if isinstance(problem, RotaryProblem):
        return _rotated(problem, *inputs)
    if isinstance(problem, EmbeddingProblem):
        count = 2 * len(problem.tables)
        pairs = zip(inputs[:count:2], inputs[1:count:2])
        gathered = [table[index.repeat(problem.m // len(index))] for index, table in pairs]
        return _after_source(problem.of_sum, sum(gathered[1:], gathered[0]), inputs[count:])
    if isinstance(problem, MlpProblem):
        count = len(problem.first.inputs)
        return fusion_reference(problem.second, fusion_reference(problem.first, inputs[:count]) + inputs[count:])
    if isinstance(problem, GemmProblem):
        a, w, *operands = inputs
        return _after_source(problem, a @ (w.T if problem.w_layout == "nk" else w), operands)
    return _after_source(problem, inputs[0], inputs[1:])


def attention_reference(problem: AttentionProblem, inputs: list, keep: torch.Tensor) -> list[torch.Tensor]:
    """[out] or [out, lse] of q, k, v, [bias], [sink], [prior, prior_lse].

    The mask broadcasts to (batch, heads, q_len, kv_len).  One batch entry after the other: the scores of all at once
    may not fit in memory.
    """
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


def _heads_first(problem, operand: str, x: torch.Tensor) -> torch.Tensor:
    """(batch, q_heads, length, dim) of q, k or v in its layout."""
    layout = getattr(problem.layouts, operand)
    if isinstance(layout, View):
        strides = (layout.batch, layout.head, layout.token, 1)
        x = x.as_strided(problem.logical_shape(operand), strides, layout.offset)
    else:
        x = x.permute([layout.index(dimension) for dimension in "bhsd"])
    return x.repeat_interleave(problem.q_heads // x.shape[1], dim=1)


def _after_source(problem: RowProblem, x: torch.Tensor, operands: list) -> list[torch.Tensor]:
    """The steps and the norm on a source x (m, n)."""
    remaining = iter(operands)
    for step in problem.steps:
        if step.value is not None:
            x = x * step.value if step.kind == "scale" else x.clamp(-step.value, step.value)
        elif step.operand is None:
            x = ACTIVATIONS[step.kind](x)
        else:
            x = x + next(remaining) if step.kind == "add" else x * next(remaining)
    if problem.norm is None:
        return [x]
    weight = next(remaining) if problem.norm.weight else None
    bias = next(remaining) if problem.norm.bias else None
    if problem.norm.kind == "layer_norm":
        out = F.layer_norm(x, (problem.n,), weight, bias, problem.norm.eps)
    else:
        out = F.rms_norm(x, (problem.n,), weight, problem.norm.eps)
        out = out if bias is None else out + bias
    return [out, x] if problem.keeps_sum else [out]


def _rotated(problem: RotaryProblem, *inputs) -> list[torch.Tensor]:
    *sources, cos, sin = inputs
    if problem.packed_heads is not None:
        (packed,) = sources
        sources = packed[:, :, : problem.heads + problem.kv_heads].split((problem.heads, problem.kv_heads), 2)
    cos, sin = (table.to(sources[0].dtype)[:, :, None] for table in (cos, sin))

    def turned(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    results = [turned(x) for x in sources]
    return results if problem.out_layout == "bshd" else [x.transpose(1, 2).contiguous() for x in results]
