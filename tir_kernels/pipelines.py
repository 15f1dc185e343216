"""The choice of the TIR pipeline that lowers functions for a target."""

from tir_kernels.compiling.cpu import cpu_pipeline_name
from tir_kernels.cuda.compile import tir_pipeline_name


def pipeline_of(target) -> str:
    """The name of the target's pipeline."""
    return tir_pipeline_name if target.kind.name == "cuda" else cpu_pipeline_name
