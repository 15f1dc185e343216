"""Which TIR pipeline lowers functions for a target."""

from tir_kernels.cpu_compile import cpu_pipeline_name
from tir_kernels.cuda_compile import tir_pipeline_name


def pipeline_of(target) -> str:
    """Its name."""
    return tir_pipeline_name if target.kind.name == "cuda" else cpu_pipeline_name
