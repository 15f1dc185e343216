"""The GPUs that kernels and predictions know: one record holds all facts that the compiler uses about a GPU.

Nothing else in the compiler spells such a number or compares names of architectures.  A new GPU is a new record here.
If a GPU needs device code of its own, the record gets a field for that feature, and the kernels check it.
"""

import re
from dataclasses import dataclass, replace

import tvm

from tir_kernels.errors import TargetError

WARP = 32  # threads
RESERVED_SHARED = 1024  # bytes of shared memory that the system reserves for each CTA, on every GPU listed


@dataclass(frozen=True)
class GPU:
    """The facts of a GPU.

    name : str
        The end of its TVM tag, if it has one: "h100" for "nvidia/nvidia-h100".
    arch : str
        The number of its architecture, its compute capability without the point: "90".
    multiprocessors : int
    shared_bytes : int
        Shared memory of a multiprocessor, of which a CTA may have all but `RESERVED_SHARED`.
    l2_bytes : int
        Size of the L2 cache.
    bandwidth : float
        Memory bandwidth in bytes per µs (MB/s): measured by copies on some GPUs, else about the data sheet's.
    threads, registers, partitions : int
        Numbers of each multiprocessor: the most resident threads, the 32-bit registers, and the partitions, each of
        which has its own share of warps and registers.
    suffixes : tuple of str
        Suffixes that `arch` may have in the names of architectures: "" for none, "a" for instructions of its own, "f"
        for those of its family.
    wgmma : bool
        Whether it has wgmma and the tensor memory accelerator, as Hopper has them.
    dependent_launch : bool
        Whether a kernel may be launched while the one before still runs.
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
        """How many CTAs with `shared_bytes` of shared memory each fit a multiprocessor."""
        return self.shared_bytes // (shared_bytes + RESERVED_SHARED)


OWN, OWN_OR_FAMILY = ("", "a"), ("", "a", "f")

# The first GPU of an architecture stands for its unlisted ones.  The fitted rates of kernels are an H200's.  No kernel
# was timed on the others: only the numbers below are known of them.
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
    """The suffix of an architecture, such as "a" of "sm_90a".

    Code for "a" may use what no other architecture has; code for "f", what none outside the family has.
    """
    return arch.removeprefix(f"sm_{architecture_number(arch)}")


def is_newer(arch: str, other: str) -> bool:
    """Whether the architecture of the first name, "sm_90a", is newer than that of the second."""
    return int(architecture_number(arch) or 0) > int(architecture_number(other) or 0)


def gpus_of_architecture(number: str | None) -> list[GPU]:
    """The listed GPUs of an architecture such as "90"; the first stands for unlisted ones.  [] if none is listed."""
    return [gpu for gpu in GPUS if gpu.arch == number]


def gpu_of(target: tvm.target.Target) -> GPU:
    """The record of a CUDA target's GPU.

    The target's `arch` names the architecture.  Among the listed GPUs of that architecture the function takes

    1. the one whose name ends the target's `tag`, which only targets made from a dict have;
    2. else the one whose L2 cache has `l2_cache_size_bytes`, which some of TVM's tags set ("nvidia/nvidia-h100");
    3. else the first: "sm_90" alone means an H200, also where the target comes from the GPU that is present.

    If the target gives another size of the L2 cache, the record gets that size.
    Raises TargetError for an architecture of which no GPU is listed.
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
