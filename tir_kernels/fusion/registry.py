"""The list of fusion kernel templates, by target."""

from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.group import group as group_cuda
from tir_kernels.fusion.grouped import grouped as grouped_cuda
from tir_kernels.fusion.grouped import simt as grouped_simt_cuda
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.reduce import reduce as reduce_cuda
from tir_kernels.fusion.rows import chain as row_chain_cuda
from tir_kernels.fusion.rows import embedding as row_embedding_cuda
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.fusion.rows import rotary as row_rotary_cuda
from tir_kernels.fusion.sorting import merge as sort_merge_cuda
from tir_kernels.fusion.sorting import sort as sort_cuda
from tir_kernels.template import Template

TEMPLATES: tuple[Template, ...] = (
    gemv_cuda,
    gemm_norm_cuda,
    gemm_cuda,
    mlp_cuda,
    grouped_cuda,
    grouped_simt_cuda,
    row_norm_cuda,
    row_chain_cuda,
    row_embedding_cuda,
    row_rotary_cuda,
    group_cuda,
    reduce_cuda,
    sort_cuda,
    sort_merge_cuda,
)


def templates_for(target) -> list[Template]:
    """The templates of a target's kind; [] where only TVM's own schedules cover it."""
    return [t for t in TEMPLATES if t.TARGET_KIND == target.kind.name]
