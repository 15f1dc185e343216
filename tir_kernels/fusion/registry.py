"""The fusion kernel templates there are, by target."""

from types import ModuleType

from tir_kernels.fusion import (
    gemm_cuda,
    gemm_norm_cuda,
    gemv_cuda,
    mlp_cuda,
    row_chain_cuda,
    row_embedding_cuda,
    row_norm_cuda,
    row_rotary_cuda,
)

TEMPLATES: tuple[ModuleType, ...] = (
    gemv_cuda,
    gemm_norm_cuda,
    gemm_cuda,
    mlp_cuda,
    row_norm_cuda,
    row_chain_cuda,
    row_embedding_cuda,
    row_rotary_cuda,
)


def templates_for(target) -> list[ModuleType]:
    """The templates of a target's kind; none where nothing but TVM's own schedules covers it."""
    return [t for t in TEMPLATES if t.TARGET_KIND == target.kind.name]
