"""What every product by wgmma (sm_90a) needs: descriptors of shared tiles, uniform warp numbers, pinned registers."""

from tvm.script import tirx as T
from tvm.tirx import const  # T.uint64 takes no number of 2^63 or more

from tir_kernels.cuda.ptx import ALL_LANES
from tir_kernels.cuda.shared_tiles import PanelTile, SharedTile

GROUP_ROWS = 8  # after which the swizzle repeats
SWIZZLES = {128: 1 << 62, 64: 2 << 62, 32: 3 << 62}  # by the bytes of a panel's row


def descriptor(tile: SharedTile, address):
    """The uint64 operand of wgmma that describes a matrix in shared memory: its start and its layout.

    The field of the leading dimension holds the distance between panels.  Panels follow one another along the head of
    keys and values, and along the columns of a matrix whose rows lie along k.
    """
    assert isinstance(tile, PanelTile)
    fixed = tile.panel_bytes // 16 << 16 | GROUP_ROWS * tile.pitch // 16 << 32 | SWIZZLES[tile.pitch]
    return const(fixed, "uint64") + T.cast(address // 16, "uint64")


def uniform_warp(thread):
    """A thread's warp number, known to be equal in all lanes: values derived from it are computed once a warp."""
    return T.tvm_warp_shuffle(T.uint32(ALL_LANES), thread // 32, 0, 32, 32)


def _pin(name: str, kind: str, constraint: str) -> tuple[str, str]:
    """The name and the source of a device function that does nothing but keep the uses of a register in order."""
    body = f'asm volatile("" : "+{constraint}"(x));'
    return name, f"__forceinline__ __device__ void {name}({kind}& x) {{\n  {body}\n}}\n"


PIN_FLOAT = _pin("pin_float", "float", "f")
PIN_WORD = _pin("pin_word", "unsigned int", "r")
