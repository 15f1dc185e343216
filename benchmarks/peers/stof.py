"""This project's kernel: what `stof_tvm.sparse_attention` chooses by itself."""

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.system import Prepared


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """Choose the kernel; ValueError if the library's mask is not the one that the other systems get."""
    import torch

    from stof_tvm import sparse_attention
    from tir_kernels.attention.problem import AttentionProblem
    from tir_kernels.attention.select import choose
    from tir_kernels.target import cuda_arch, parse_target

    mask, dim = pattern.stof_mask(), case.head_dim
    if device == "cuda":
        target = parse_target({"kind": "cuda", "arch": cuda_arch(*torch.cuda.get_device_capability())})
    else:
        target = parse_target("llvm")
    problem = AttentionProblem(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, dim, dim, case.dtype, dim**-0.5
    )
    choice = choose(problem, mask, target)
    if abs(choice.density - pattern.density) > 1e-9:
        raise ValueError(f"{mask!r} keeps {choice.density:.9f}, the benchmark's mask {pattern.density:.9f}")
    return Prepared(
        call=lambda q, k, v: sparse_attention(q, k, v, mask, enable_gqa=True),
        variant=choice.label,
        scheduled=choice.scheduled_density,
    )
