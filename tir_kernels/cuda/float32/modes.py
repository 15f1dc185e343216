"""How GPUs multiply float32: "ieee" as exactly as float32 is, "tf32" with 11 bits of each number and faster."""

from tir_kernels.errors import InputError

MODES = ("ieee", "tf32")


def check_mode(mode: object, dtype: str | None = None) -> None:
    """Raise InputError for what is no mode, and for "tf32" where a problem's dtype is not float32."""
    if mode not in MODES:
        raise InputError(f"float32={mode!r} is not one of {', '.join(map(repr, MODES))}")
    if dtype not in (None, "float32") and mode != "ieee":
        raise InputError(f"float32={mode!r} for operands of {dtype}")


def mma_time(dtype: str, mode: str) -> int:
    """The time of a multiply-add over that of 16-bit ones: tensor cores multiply tf32 half as fast.  Not fitted."""
    if dtype != "float32":
        return 1
    return 2 * (3 if mode == "ieee" else 1)


def fragment_words(mode: str, a_fragments: int) -> int:
    """Registers of a lane that products need besides raw fragments and accumulators, with so many of a at once."""
    return 8 * a_fragments + 16 if mode == "ieee" else 4 * a_fragments + 2
