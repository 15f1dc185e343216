"""What the tests of the CUDA fusion kernels share: random operands, generated source, a run on the CPU."""

import numpy as np
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned, tensor_map
from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.gemm.tma import boxes, grid_size, tensor_map_fields
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.target import parse_target

BIAS, GELU, RESIDUAL = Step("add", "row"), Step("gelu"), Step("add", "matrix")


def mlp(m, k, inner, n, inner_steps=(BIAS, GELU), steps=(BIAS, RESIDUAL), dtype="float16", **second) -> MlpProblem:
    """Two products, of which the first is (m, k) by (k, inner), as adapters have them."""
    first = GemmProblem(m, inner, dtype, inner_steps, k=k)
    return MlpProblem(first, GemmProblem(m, n, dtype, steps, k=inner, **second))


def arch_of(config) -> str:
    """The oldest architecture that runs a configuration."""
    return "sm_90a" if getattr(config, "warpgroup", False) else "sm_80"


def ctas_of(g: GemmGeometry) -> int:
    """CTAs of a product's grid, on the GPU that stands for its architecture."""
    gpu = gpu_of(parse_target(f"cuda -arch={arch_of(g.config)}"))
    return grid_size(g, gpu) if g.config.tma else g.ctas


def make_inputs(problem, seed=0) -> list[torch.Tensor]:
    """Unit normal inputs in argument order; a product's weights are scaled so that its elements are about one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape, _ in problem.inputs]
    if isinstance(problem, GemmProblem):
        tensors[1] *= problem.k**-0.5
    return [x.to(getattr(torch, dtype)) for x, (_, dtype) in zip(tensors, problem.inputs)]


def run_emulated(
    template, problem, config, inputs, ctas, threads, shared_bytes, folder, runs=1, cluster=1
) -> list[np.ndarray]:
    """float64 outputs of generated CUDA on the CPU, CTAs in random order; equal in every run."""
    names = ["a", "w", *(f"operand{i}" for i in range(len(inputs) - 2))]
    arrays = {name: aligned(_bits(x)) for name, x in zip(names, inputs)}
    given = template.operands(problem, config, parse_target(f"cuda -arch={arch_of(config)}"))
    workspace = [aligned(np.zeros(shape, kind)) for shape, kind in given.workspace]
    arrays |= dict(zip(("partials", "arrivals") if len(workspace) == 2 else ("arrivals",), workspace))
    if getattr(config, "tma", False):
        g = GemmGeometry(problem, config)
        arrays |= {f"{name}_map": _tensor_map(g, name, arrays[name]) for name in "aw"}
        if g.tail is not None:
            arrays["tail_map"] = _tensor_map(g.tail, "w", arrays["w"])
    unwritten = [torch.full(shape, torch.nan, dtype=getattr(torch, dtype)) for shape, dtype in problem.outputs]
    outputs = {name: aligned(_bits(x)) for name, x in zip(_outputs(problem), unwritten)}
    kernel = EmulatedKernel(source(template, problem, config, arch_of(config)), folder)
    results = []
    for run in range(runs):
        for out, x in zip(outputs.values(), unwritten):
            out[...] = _bits(x)
        if "partials" in arrays:
            arrays["partials"][...] = np.nan
        clusters = np.random.default_rng(run).permutation(ctas // cluster)
        order = (clusters[:, None] * cluster + np.arange(cluster)).ravel()
        kernel(arrays | outputs, {}, order, threads, shared_bytes, cluster)
        if workspace:
            assert not arrays["arrivals"].any(), "the next launch must find what this one found"
        copies = [torch.from_numpy(out.copy()).view(x.dtype) for out, x in zip(outputs.values(), unwritten)]
        results.append([x.double().numpy() for x in copies])
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(x, y)
    return results[0]


def _tensor_map(g: GemmGeometry, name: str, array) -> np.ndarray:
    """As the emulator wants it."""
    return tensor_map(array, 0, tensor_map_fields(array.shape, boxes(g)[name]))


def _outputs(problem) -> list[str]:
    return ["out"] + ["out_sum"] * problem.keeps_sum + ["statistics"] * getattr(problem, "statistics", False)


def _bits(x: torch.Tensor) -> np.ndarray:
    """As NumPy holds it, which knows no bfloat16."""
    return (x if x.dtype == torch.float32 else x.view(torch.int16)).numpy()


def assert_close(problem, actual, expected):
    """Within two roundings to the problem's dtype of the float64 result."""
    eps = torch.finfo(getattr(torch, problem.dtype)).eps
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2 * eps, rtol=eps)


def assert_emulated(template, problem, config, folder, runs=1):
    """The kernel's CUDA on the CPU gives the reference's result."""
    g = GemmGeometry(problem, config)
    inputs = make_inputs(problem)
    ctas = ctas_of(g)
    cluster = config.splits if g.in_clusters else 1
    actual = run_emulated(template, problem, config, inputs, ctas, g.threads, g.shared_bytes, folder, runs, cluster)
    assert_close(problem, actual, fusion_reference(problem, *(x.double() for x in inputs)))
