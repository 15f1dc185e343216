"""What every product by wgmma (sm_90a) needs: descriptors of shared tiles, and functions that pin registers."""

from tvm.script import tirx as T

from tir_kernels.cuda.shared_tiles import PanelTile, SharedTile

GROUP_BYTES = 1024  # 8 rows of 128 bytes, after which the swizzle repeats
SWIZZLE_128 = 1 << 62


def descriptor(tile: SharedTile, address):
    """The uint64 operand of wgmma that describes a matrix in shared memory: its start and its layout.

    The field of the leading dimension holds the distance between panels.  Panels follow one another along the head of
    keys and values, and along the columns of a matrix whose rows lie along k.
    """
    assert isinstance(tile, PanelTile)
    fixed = tile.panel_bytes // 16 << 16 | GROUP_BYTES // 16 << 32 | SWIZZLE_128
    return T.uint64(fixed) + T.cast(address // 16, "uint64")


def _pin(name: str, kind: str, constraint: str) -> tuple[str, str]:
    """The name and the source of a device function that does nothing but keep the uses of a register in order."""
    body = f'asm volatile("" : "+{constraint}"(x));'
    return name, f"__forceinline__ __device__ void {name}({kind}& x) {{\n  {body}\n}}\n"


PIN_FLOAT = _pin("pin_float", "float", "f")
PIN_WORD = _pin("pin_word", "unsigned int", "r")
