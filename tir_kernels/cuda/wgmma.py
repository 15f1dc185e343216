"""What every product by wgmma (sm_90a) needs: descriptors of shared tiles, and accumulators that are not moved."""

GROUP_BYTES = 1024  # 8 rows of 128 bytes, after which the swizzle repeats


SWIZZLE_128 = 1 << 62


def _pin(name: str, kind: str, constraint: str) -> tuple[str, str]:
    """A device function that only keeps the uses of a register in their order, and its source."""
    body = f'asm volatile("" : "+{constraint}"(x));'
    return name, f"__forceinline__ __device__ void {name}({kind}& x) {{\n  {body}\n}}\n"


PIN_FLOAT = _pin("pin_float", "float", "f")
PIN_WORD = _pin("pin_word", "unsigned int", "r")
