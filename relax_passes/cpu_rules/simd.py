"""What the rules know of the processor: the width of its vectors and how many of them it has."""

from dataclasses import dataclass

from tvm.target.codegen import llvm_get_system_triple, target_has_features


@dataclass(frozen=True)
class Simd:
    """`lanes` fp32 values a vector register, `registers` of them."""

    lanes: int
    registers: int

    @property
    def accumulators(self) -> int:
        """Registers that a GEMM tile may fill; the others hold a row of B and the broadcast value of A."""
        return self.registers * 3 // 4


def simd_of(target) -> Simd:
    """The vectors that LLVM may use for this target: AVX-512, AVX, else 128 bits (SSE, Neon)."""
    if target_has_features("avx512f", target):
        return Simd(lanes=16, registers=32)
    if target_has_features("avx", target):
        return Simd(lanes=8, registers=16)
    triple = str(target.attrs.get("mtriple", "") or llvm_get_system_triple())
    return Simd(lanes=4, registers=32 if triple.startswith(("aarch64", "arm64")) else 16)
