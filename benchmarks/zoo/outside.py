"""How much of an engine's GPU time is spent outside of this project's kernel templates."""

import functools
import re

from tir_kernels.attention.registry import TEMPLATES as ATTENTION_TEMPLATES
from tir_kernels.fusion.registry import TEMPLATES as FUSION_TEMPLATES

COPIES = ("Memcpy", "Memset")


def shares(kernels: list[list]) -> dict:
    """Launches, copies as [count, microseconds], and the share of the rest's time outside of templates.

    `kernels` is [name, count, microseconds] each; empty where there is no profile, and then so is the result.
    """
    launched = [kernel for kernel in kernels if not is_copy(kernel[0])]
    if not launched:
        return {}
    outside = sum(us for name, _, us in launched if not is_template(name))
    copies = [kernel for kernel in kernels if is_copy(kernel[0])]
    return {
        "launches": sum(count for _, count, _ in launched),
        "copies": [sum(count for _, count, _ in copies), round(sum(us for *_, us in copies), 1)],
        "outside": round(outside / sum(us for *_, us in launched), 4),
    }


def is_copy(kernel: str) -> bool:
    """Whether a name of the profiler stands for a copy or a fill instead of a kernel."""
    return kernel.startswith(COPIES)


def is_template(kernel: str) -> bool:
    """Whether a GPU kernel comes from a template: "fused_gemm3_kernel", "sparse_attention_block_wise_kernel_1"."""
    return _templates().match(kernel) is not None


@functools.cache
def _templates() -> re.Pattern:
    """TVM numbers functions of the same name, and appends "_kernel" and the number of the kernel in the function."""
    names = [f"fused_{template.NAME}" for template in FUSION_TEMPLATES if template.TARGET_KIND == "cuda"]
    names.append("fused_group_copy")
    names += [f"sparse_attention_{t.NAME}" for t in ATTENTION_TEMPLATES if t.TARGET_KIND == "cuda"]
    return re.compile(f"({'|'.join(name.replace('-', '_') for name in names)})\\d*_kernel")
