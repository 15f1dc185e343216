"""The processor as the rules know it: the width and number of its vector registers."""

from dataclasses import dataclass

from tir_kernels.attention.cpu.vector import lanes, registers


@dataclass(frozen=True)
class Simd:
    """`registers` vector registers of `lanes` fp32 values each."""

    lanes: int
    registers: int

    @property
    def accumulators(self) -> int:
        """Registers that a GEMM tile may fill; the others hold a row of B and the broadcast value of A."""
        return self.registers * 3 // 4


def simd_of(target) -> Simd:
    """The vectors of an LLVM target."""
    return Simd(lanes(target), registers(target))
