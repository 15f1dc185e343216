"""The GPUs that kernels and predictions know: one record holds all that is asked of a GPU.

Nothing else in the compiler spells such a number or compares names of architectures.  A new GPU is a record here; one
that needs device code of its own gets a feature, which its kernels ask for.
"""

import re
from dataclasses import dataclass, replace

import tvm

from tir_kernels.errors import TargetError

WARP = 32  # threads
RESERVED_SHARED = 1024  # bytes of shared memory that the system takes of each CTA, on every GPU listed


@dataclass(frozen=True)
class GPU:
    """The facts of a GPU.

    name : str
        As TVM's tags end, where there is one: "h100" for "nvidia/nvidia-h100".
    arch : str
        The number of its architecture, its compute capability without the point: "90".
    multiprocessors : int
    shared_bytes : int
        Shared memory of a multiprocessor, of which a CTA may have all but `RESERVED_SHARED`.
    l2_bytes : int
        Of the L2 cache.
    bandwidth : float
        Memory bandwidth, bytes per µs (MB/s): as measured by copies where it was, else about the data sheet's.
    threads, registers, partitions : int
        Of a multiprocessor: the threads that may be resident, the 32-bit registers, and the parts, each with its own
        share of warps and registers.
    suffixes : tuple of str
        Suffixes of `arch` in names of code: "a" for instructions of its own, "f" for those of its family.
    wgmma : bool
        Whether it has wgmma and the tensor memory accelerator, as Hopper has them.
    dependent_launch : bool
        Whether a kernel may be launched while the one before is at work.
    """

    name: str
    arch: str
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    bandwidth: float
    threads: int = 2048
    registers: int = 1 << 16
    partitions: int = 4
    suffixes: tuple[str, ...] = ("",)
    wgmma: bool = False
    dependent_launch: bool = False

    @property
    def block_shared_bytes(self) -> int:
        """Shared memory that one CTA may have."""
        return self.shared_bytes - RESERVED_SHARED

    def ctas_that_share(self, shared_bytes: int) -> int:
        """CTAs of so much shared memory that a multiprocessor holds."""
        return self.shared_bytes // (shared_bytes + RESERVED_SHARED)


OWN, OWN_OR_FAMILY = ("", "a"), ("", "a", "f")

# The first of an architecture stands for those of it that are not listed.  Fitted rates of kernels are an H200's; of
# the others only what stands here is known, and nothing was timed on one.
A6000 = GPU("a6000", "86", 84, 100 << 10, 6 << 20, 0.75e6, threads=1536)
H200 = GPU("h200", "90", 132, 228 << 10, 60 << 20, 4.3e6, suffixes=OWN, wgmma=True, dependent_launch=True)
B200 = GPU("b200", "100", 148, 228 << 10, 126 << 20, 7.2e6, suffixes=OWN_OR_FAMILY, dependent_launch=True)
THOR = replace(B200, name="agx-thor", arch="110", multiprocessors=20, l2_bytes=32 << 20, bandwidth=0.25e6, threads=1536)
RTX_5090 = replace(A6000, name="rtx-5090", arch="120", multiprocessors=170, l2_bytes=96 << 20, bandwidth=1.6e6)
RTX_5090 = replace(RTX_5090, suffixes=OWN_OR_FAMILY, dependent_launch=True)
GPUS = [
    GPU("a100", "80", 108, 164 << 10, 40 << 20, 1.55e6),
    A6000,
    GPU("agx-orin", "87", 16, 164 << 10, 4 << 20, 0.18e6, threads=1536),
    replace(A6000, name="like the a6000", arch="88"),
    GPU("l40s", "89", 142, 100 << 10, 96 << 20, 0.86e6, threads=1536),
    H200,
    replace(H200, name="h100", l2_bytes=50 << 20, bandwidth=3.0e6),
    B200,
    replace(B200, name="like the b200", arch="103"),
    THOR,
    RTX_5090,
    replace(RTX_5090, name="gb10", arch="121", multiprocessors=48, l2_bytes=24 << 20, bandwidth=0.25e6),
]


def architecture_number(arch: str) -> str | None:
    """ "90" of "sm_90" and "sm_90a"; None where it is no name of an architecture."""
    found = re.fullmatch("sm_([0-9]{1,4})[af]*", arch)
    return found[1] if found else None


def architecture_suffix(arch: str) -> str:
    """ "a" of "sm_90a": code for it uses what no other architecture has, "f" what none outside its family has."""
    return arch.removeprefix(f"sm_{architecture_number(arch)}")


def is_newer(arch: str, other: str) -> bool:
    """Whether the architecture of the first name, "sm_90a", is newer than that of the second."""
    return int(architecture_number(arch) or 0) > int(architecture_number(other) or 0)


def gpus_of_architecture(number: str | None) -> list[GPU]:
    """The listed GPUs of an architecture, "90", the one that stands for all others first; [] if none is listed."""
    return [gpu for gpu in GPUS if gpu.arch == number]


def gpu_of(target: tvm.target.Target) -> GPU:
    """What is known of the GPU of a CUDA target.

    The target's `arch` names the architecture, and so the GPUs it may be.  Of several it is the one that its `tag` ends
    with, which only dicts keep, else the one with the L2 cache of `l2_cache_size_bytes`, which some of TVM's tags set
    ("nvidia/nvidia-h100"), else the first: "sm_90" alone means an H200, and so does the GPU that is found here.  A GPU
    that is not listed is like the first of its architecture, with the L2 cache that the target says.
    Raises TargetError for an architecture of which none is listed.
    """
    attributes = target.attrs
    alike = gpus_of_architecture(architecture_number(str(attributes["arch"])))
    if not alike:
        raise TargetError(f"no GPU of {attributes['arch']} is known")
    tag, l2_bytes = str(target.tag), int(attributes.get("l2_cache_size_bytes", 0))
    tagged = [gpu for gpu in alike if tag.endswith(gpu.name)]
    same_cache = [gpu for gpu in alike if gpu.l2_bytes == l2_bytes]
    gpu = [*tagged, *same_cache, *alike][0]
    return replace(gpu, l2_bytes=l2_bytes) if l2_bytes and l2_bytes != gpu.l2_bytes else gpu


def has_wgmma(target: tvm.target.Target) -> bool:
    """Whether code for the target may use Hopper's own instructions, which run nowhere else."""
    return gpu_of(target).wgmma and architecture_suffix(str(target.attrs["arch"])) == "a"
