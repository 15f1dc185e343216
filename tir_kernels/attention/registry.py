"""The list of attention kernel templates, by target."""

from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.cpu import block_wise as block_wise_cpu
from tir_kernels.attention.cpu import row_wise as row_wise_cpu
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.template import AttentionTemplate
from tir_kernels.attention.warp_specialized import kernel as warp_specialized
from tir_kernels.errors import UnsupportedError

TEMPLATES: tuple[AttentionTemplate, ...] = (
    block_wise_cpu, row_wise_cpu, block_wise_cuda, row_wise_cuda, warp_specialized
)  # fmt: skip


def templates_for(target, name: str | None = None) -> list[AttentionTemplate]:
    """The templates of a target's kind, or the one called `name`; UnsupportedError where that leaves none."""
    kind = target.kind.name
    found = [t for t in TEMPLATES if t.TARGET_KIND == kind and name in (None, t.NAME)]
    if not found:
        known = ", ".join(sorted({t.NAME for t in TEMPLATES if t.TARGET_KIND == kind}))
        raise UnsupportedError(f"there is no attention kernel {name!r} for target kind {kind!r}; there are: {known}")
    return found
