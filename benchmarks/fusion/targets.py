"""What the fused kernels must reach, and whether a set of results does."""

from benchmarks.fusion.cases import BERT, FEW, LENGTHS, LLAMA, NORMED, NORMS, SHORT, FusionCase, mlp_cases
from benchmarks.fusion.results import OURS, FusionResults, floor_us, matrix_us, memory_us
from benchmarks.fusion.stof import MMA
from benchmarks.peers.targets import Line
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.mlp import mlp as mlp_cuda

LARGE = 4096  # rows from which kernels are bound by what they do, not by their launch


def lines(results: FusionResults) -> list[Line]:
    """The table of requirements, computed; ratios are the other's time over ours."""

    def line(what, against, cases, other, ours=lambda case: results.us(case, OURS), by=OURS, **bounds):
        result = Line(what, against, **bounds)
        for case in cases:
            theirs = other(case)
            if theirs is None or (case, by) not in results.rows:
                result.missing.append(case)
            else:
                result.ratios[case] = theirs / ours(case) if ours(case) is not None else 0.0
        return result

    def system(name):
        return lambda case: results.us(case, name)

    def gelu(shapes, lengths):
        return [FusionCase("gemm-gelu", m, n, k) for n, k in shapes for m in lengths]

    long = [m for m in LENGTHS if m not in SHORT]
    rows = [FusionCase("residual-norm", m, n, 0) for n in NORMS for m in (1, *LENGTHS)]
    large_rows = [case for case in rows if case.m >= LARGE]
    normed = [FusionCase("gemm-norm", m, n, k) for n, k in NORMED for m in LENGTHS]
    decoding, mlps = gelu((*BERT, *LLAMA), FEW), mlp_cases()
    return [
        line("GEMM + bias + GELU, BERT, M ≤ 2048", "cuBLAS + one compiled kernel", gelu(BERT, SHORT),
             system("cublas-compile"), geomean=1.15),
        line("GEMM + bias + GELU with sm_80 instructions, BERT, M ≤ 2048", "cuBLAS + one compiled kernel",
             gelu(BERT, SHORT), system("cublas-compile"), ours=system(MMA), by=MMA, geomean=1.15),
        line("GEMM + bias + GELU, M ≥ 4096", "790 TFLOP/s", gelu((*BERT, *LLAMA), long), matrix_us, everywhere=0.45),
        line("GEMM + bias + GELU, LLaMA-like, M ≤ 2048", "790 TFLOP/s", gelu(LLAMA, SHORT), matrix_us, everywhere=0.45),
        line("(for information) the same two", "the floor, memory or products",
             [*gelu((*BERT, *LLAMA), long), *gelu(LLAMA, SHORT)], floor_us),
        line("(for information) GEMM + bias + GELU, M ≥ 128", "cuBLAS's product alone", gelu((*BERT, *LLAMA), LENGTHS),
             system("cublas")),
        line("residual + bias + norm, M ≥ 4096", "the memory floor", large_rows, memory_us, everywhere=0.9),
        line("(for information) the same", "torch.add, which moves as many bytes", large_rows, system("torch-add")),
        line("residual + bias + norm", "torch.compile", rows, system("compile"), everywhere=1.0),
        line("GEMM + bias + residual + norm, where predicted to pay", "the two kernels it replaces",
             [case for case in normed if _is_proposed(results, case)], system("stof-unfused"), everywhere=1.0),
        line("(for information) the same, everywhere", "the two kernels it replaces", normed, system("stof-unfused")),
        line("(for information) GEMM + bias + residual + norm, the better of the two", "the best of PyTorch's", normed,
             lambda case: min(results.peers(case).values(), default=None),
             ours=lambda case: _proposed_us(results, case)),
        line("two products in one kernel, where predicted to pay", "the two kernels it replaces",
             [case for case in mlps if _is_proposed(results, case)], system("stof-unfused"), everywhere=1.0),
        line("(for information) the same, everywhere", "the two kernels it replaces", mlps, system("stof-unfused")),
        line("(for information) two products, one kernel or two as predicted", "the best of PyTorch's", mlps,
             lambda case: min(results.peers(case).values(), default=None),
             ours=lambda case: _proposed_us(results, case)),
        line("(for information) decoding, M ≤ 16", "the memory floor", decoding, memory_us),
        line("(for information) the same", "cuBLAS + one compiled kernel", decoding, system("cublas-compile")),
    ]  # fmt: skip


def _is_proposed(results: FusionResults, case: FusionCase) -> bool:
    """Whether the analytical model may prefer one kernel to two, and does."""
    template = mlp_cuda if case.template == "mlp" else gemm_norm_cuda
    if not getattr(template, "IS_PROPOSED", True):
        return False
    one, two = (results.predicted_us(case, system) for system in (OURS, "stof-unfused"))
    return one is not None and two is not None and one < two


def _proposed_us(results: FusionResults, case: FusionCase) -> float | None:
    """Measured time of what the analytical model prefers."""
    return results.us(case, OURS if _is_proposed(results, case) else "stof-unfused")
