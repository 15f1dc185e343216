"""The exceptions of the project, for users to catch; `tir_kernels.errors` defines them."""

from tir_kernels.errors import (
    ArtifactError,
    CompileError,
    DeviceError,
    ExportError,
    InputError,
    MaskError,
    NotRewrittenError,
    ParallelError,
    SchemeError,
    StofError,
    TargetError,
    TuningLogError,
    UnsupportedError,
    VerificationError,
)

__all__ = [
    "ArtifactError",
    "CompileError",
    "DeviceError",
    "ExportError",
    "InputError",
    "MaskError",
    "NotRewrittenError",
    "ParallelError",
    "SchemeError",
    "StofError",
    "TargetError",
    "TuningLogError",
    "UnsupportedError",
    "VerificationError",
]
