"""The figures of GPUs that the models of kernels' times need."""

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Architecture:
    """Multiprocessors, shared memory and 32-bit registers of each, and memory bandwidth in bytes a µs."""

    multiprocessors: int
    shared_bytes: int
    bandwidth: float


ARCHITECTURES = {
    "80": Architecture(108, 164 << 10, 1.55e6),  # A100
    "86": Architecture(84, 100 << 10, 0.75e6),  # A10, RTX 3090
    "89": Architecture(142, 100 << 10, 0.86e6),  # L40S
    "90": Architecture(132, 228 << 10, 4.3e6),  # H200
}


def architecture(arch: str) -> Architecture:
    """The architecture that a name such as "sm_80" stands for; an H200's where the name is unknown."""
    return ARCHITECTURES.get(arch.removeprefix("sm_").rstrip("af"), ARCHITECTURES["90"])


def has_wgmma(target: tvm.target.Target) -> bool:
    """Whether code for the target may use Hopper's own instructions, which run nowhere else."""
    return str(target.attrs["arch"]) == "sm_90a"
