"""Run every CUDA kernel case on the GPU present, check it against PyTorch, and write the manifest `verified.json`.

usage: python tests/gpu/verify.py [--out verified.json] [--only TEXT]… [--missing] [--verbose]

Exit status 1 if any case fails; 3 where one does not end, which ends everything.  With --only or --missing, the
manifest keeps what it has of other cases; it has none that fails.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from all_cases import CASES  # noqa: E402
from attention_cases import Case, source_hash  # noqa: E402

from tir_kernels.attention.problem import View  # noqa: E402

MANIFEST = Path(__file__).with_name("verified.json")
GUARD = 1024  # elements before and after the output that must stay untouched
LONGEST_S = 20.0  # that a case runs; of a kernel that hangs, nothing but the end of its process is left
HUNG = 3  # exit status


def build(arguments) -> str:
    """`compile_case` of CASES[index], path and arch: the modules that cases name cannot be sent to another process."""
    index, path, arch = arguments
    return compile_case(CASES[index], path, arch)


def compile_case(case, path, arch) -> str:
    """Compile a case's kernel to a shared library, for its own architecture if it has one; hash of its CUDA source."""
    import tvm

    from tir_kernels.compiling.quick_script import quick_script
    from tir_kernels.cuda.compile import cuda_source
    from tir_kernels.target import parse_target

    target = parse_target(f"cuda -arch={getattr(case, 'arch', None) or arch}")
    with quick_script():
        func = case.template.instantiate(case.problem, case.config, target).with_attr("global_symbol", "main")
    with target:
        executable = tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx")
    executable.export_library(path)
    return source_hash(cuda_source(executable))


def make_inputs(case: Case, seed: int):
    """q, k, v in their layouts, then the bias, the key count and the sink, each a tensor or None, fresh and random."""
    import torch

    p = case.problem
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = getattr(torch, p.dtype)
    q, k, v = (torch.randn(p.shape(x), generator=generator, device="cuda").to(dtype) for x in ("q", "k", "v"))
    sink = None
    if p.sink_dtype is not None:
        sink = 3 * torch.randn(p.q_heads, generator=generator, device="cuda")
        sink[0] = -math.inf if seed % 2 else 40.0  # none, and one that leaves the keys next to nothing
        sink = sink.to(getattr(torch, p.sink_dtype))
    counts = None
    if p.has_key_count:  # another block is the last one in each batch entry, and in each call
        counts = torch.randint(1, p.kv_len + 1, (p.key_counts,), generator=generator, device="cuda", dtype=torch.int32)
    if case.bias is None:
        return q, k, v, None, counts, sink
    bias_dtype = getattr(torch, p.bias_dtype)
    bias = torch.randn(p.bias_shape, generator=generator, device="cuda").to(bias_dtype)
    if case.bias != "normal":
        value = float("-inf") if case.bias == "infinite" else torch.finfo(bias_dtype).min
        bias[torch.rand(bias.shape, generator=generator, device="cuda") < 0.3] = value
        bias[..., : (bias.shape[-2] + 1) // 2, :] = value
    return q, k, v, bias, counts, sink


def heads_second(x, layout: str):
    """(batch, heads, length, dim) of a tensor in a layout."""
    return x.permute([layout.index(dimension) for dimension in "bhsd"])


def reference(case: Case, q, k, v, bias, sink, keep, dtype):
    """PyTorch's softmax(q kᵀ scale + bias) v in `dtype`, masked rows 0; (batch, heads, q_len, v_head_dim).

    And the log-sum-exp, (batch, heads, q_len).  A softcap bounds scores before the bias.  A sink is one more score,
    whose value is 0.
    """
    import torch

    p = case.problem

    def heads_first(x, operand):
        layout = getattr(p.layouts, operand)
        if isinstance(layout, View):
            strides = (layout.batch, layout.head, layout.token, 1)
            x = x.as_strided(p.logical_shape(operand), strides, layout.offset)
        else:
            x = heads_second(x, layout)
        return as_multiplied(x.to(dtype), p).repeat_interleave(p.q_heads // x.shape[1], dim=1)

    q, k, v = (heads_first(x, operand) for operand, x in zip("qkv", (q, k, v)))
    scores = q @ k.transpose(-1, -2) * p.scale
    if p.softcap is not None:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if bias is not None:
        # A half's lowest stands for float32's: the half computation can hold no other.
        finite = bias.double().clamp(min=torch.finfo(dtype).min).to(dtype)
        scores = scores + torch.where(bias == float("-inf"), bias.to(dtype), finite)
    scores = scores.masked_fill(~keep, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    alive = (scores > float("-inf")).any(dim=-1, keepdim=True)
    weights = torch.where(alive, torch.softmax(scores, dim=-1), 0).to(dtype)
    return as_multiplied(weights[..., : p.kv_len], p) @ v, scores.logsumexp(dim=-1)


@contextmanager
def watched(label: str, seconds: float = LONGEST_S):
    """Ends the process, with the label, where the body takes longer."""

    def give_up():
        print("HANG", label, flush=True)
        os._exit(HUNG)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def as_multiplied(x, problem):
    """A factor of a product in float32 as the kernel's tensor cores get it: rounded to tf32, ties away from zero.

    PyTorch's own switch does not do for a comparison: its products of one row, or of rows at odd places, stay exact.
    """
    import torch

    if getattr(problem, "float32", "ieee") != "tf32" or x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def wider_than(dtype):
    """The dtype of the results that errors are measured against."""
    import torch

    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def rounding(problem) -> float:
    """What an output may differ by where PyTorch's is exact, over the largest output.

    One rounding, of integers and booleans none; eight of products in float32, because short sums have the errors of
    their factors' parts.
    """
    import torch

    if "float" not in problem.dtype:
        return 0.0
    in_parts = problem.dtype == "float32" and hasattr(problem, "float32")
    return torch.finfo(getattr(torch, problem.dtype)).eps * (8 if in_parts else 1)


def poison(dtype):
    """What outputs hold before a kernel runs: NaN, of integers the largest, of booleans true."""
    import torch

    return float("nan") if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max


def largest_difference(x, y, wider) -> float:
    """0.0 if all is equal, NaN to NaN, too; of integers and booleans 1.0 if anything differs."""
    if not x.is_floating_point():
        return float((x != y).any())
    same = (x.to(wider) == y) | (x.isnan() & y.isnan())
    return float((x.to(wider) - y).abs().masked_fill(same, 0).max())


def largest_finite(x) -> float:
    """The largest magnitude among finite elements; infinities and NaN allow no error."""
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0


def run(case, kernel, seed: int) -> dict:
    """Errors against a wider dtype of the kernel and of PyTorch in the kernel's, and its time in microseconds."""
    return run_attention(case, kernel, seed) if isinstance(case, Case) else run_fusion(case, kernel, seed)


def run_fusion(case, kernel, seed: int) -> dict:
    """As `run`, for cases of the fusion templates: inputs, workspace and outputs are the kernel's arguments."""
    import torch

    from tir_kernels.target import parse_target

    dtype = getattr(torch, case.problem.dtype)
    inputs = case.make_inputs(seed)
    workspace = [
        torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        for shape, kind in case.template.operands(case.problem, case.config, parse_target()).workspace
    ]
    sizes = [math.prod(shape) for shape in case.out_shapes]
    kinds = getattr(case, "out_dtypes", [case.problem.dtype] * len(sizes))
    buffers = [
        torch.full((size + 2 * GUARD,), poison(kind), dtype=kind, device="cuda")
        for size, kind in zip(sizes, (getattr(torch, kind) for kind in kinds))
    ]
    outputs = [x[GUARD:-GUARD].view(shape) for x, shape in zip(buffers, case.out_shapes)]
    arguments = [*inputs, *workspace, *outputs]
    kernel(*arguments)
    torch.cuda.synchronize()
    first = [x.clone() for x in outputs]
    wider = wider_than(dtype)
    expected = case.torch_sequence(*(x.to(wider) if x.is_floating_point() else x for x in inputs))
    halves = case.torch_sequence(*(as_multiplied(x, case.problem) for x in inputs[:2]), *inputs[2:])
    errors, half_errors = (
        [largest_difference(x, y, wider) for x, y in zip(results, expected, strict=True)] for results in (first, halves)
    )
    time_us = median_us(kernel, arguments, poison=lambda: [x.fill_(poison(x.dtype)) for x in outputs])
    # Launch after launch: the workspace is left as it was found, and no result depends on the order of CTAs.
    repeats = all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(first, outputs))
    untouched = [torch.full((GUARD,), poison(x.dtype), dtype=x.dtype, device="cuda") for x in buffers]
    guards = [(guard, end) for guard, x in zip(untouched, buffers) for end in (x[:GUARD], x[-GUARD:])]
    guards_kept = all(
        torch.equal(guard.isnan(), end.isnan()) and (guard.isnan() | (guard == end)).all() for guard, end in guards
    )
    allowed = [
        max(2 * e, rounding(case.problem) * largest_finite(x)) if x.is_floating_point() else 0.0
        for e, x in zip(half_errors, expected)
    ]
    return {
        "error": max(errors),
        "half_error": max(half_errors),
        "ok": all(e <= most for e, most in zip(errors, allowed)) and guards_kept and repeats,
        "time_us": time_us,
    }


def run_attention(case: Case, kernel, seed: int) -> dict:
    """As `run`, for attention."""
    import numpy as np
    import torch

    from tir_kernels.target import parse_target

    p = case.problem
    q, k, v, bias, counts, sink = make_inputs(case, seed)
    operands = case.template.operands(p, case.config, parse_target(), case.block_sparse_mask()).arrays
    operands = [torch.from_numpy(a).cuda() for a in operands]
    on_gpu = lambda keep: torch.from_numpy(keep.reshape((1,) * (4 - keep.ndim) + keep.shape)).cuda()
    keep = on_gpu(case.keep())
    below = True if counts is None else torch.arange(p.kv_len, device="cuda") < counts[:, None, None, None]
    keep = keep & below
    earlier, lse = [], []
    if p.continues:
        out, prior_lse = reference(case, q, k, v, bias, None, on_gpu(case.earlier()) & below, wider_than(q.dtype))
        out = out.permute(["bhsd".index(dimension) for dimension in p.layouts.out])
        earlier = [out.to(q.dtype).contiguous(), prior_lse.float().contiguous()]
    if p.gives_lse:
        lse = [torch.full(p.lse_shape, float("nan"), device="cuda")]
    size = int(np.prod(p.shape("out")))
    buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=q.dtype, device="cuda")
    out = buffer[GUARD : GUARD + size].view(p.shape("out"))
    arguments = [q, k, v, *(x for x in (bias, counts, sink) if x is not None), *earlier, *operands, out, *lse]
    kernel(*arguments)
    torch.cuda.synchronize()
    wider = wider_than(q.dtype)
    result = heads_second(out.to(wider), p.layouts.out)
    expected, expected_lse = reference(case, q, k, v, bias, sink, keep, wider)
    half = reference(case, q, k, v, bias, sink, keep, q.dtype)[0].to(wider)
    error, half_error = (float((x - expected).abs().max()) for x in (result, half))
    # Log-sum-exps are float32 sums over products of halves: they agree to rounding, and are -inf for empty rows.
    lse_agrees = all(torch.allclose(x, expected_lse.float(), rtol=1e-4, atol=2e-3) for x in lse)
    first = out.clone()
    time_us = median_us(kernel, arguments, poison=lambda: out.fill_(float("nan")))
    # Launch after launch: the workspace is left as it was found, and merging splits does not depend on their order.
    repeats = torch.equal(first, out)
    guards_kept = bool(buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all())
    # A row that copies one value is exact in both.
    allowed = max(2 * half_error, rounding(p) * float(expected.abs().max()))
    return {
        "error": error,
        "half_error": half_error,
        "ok": error <= allowed and guards_kept and repeats and lse_agrees,
        "time_us": time_us,
    }


def median_us(kernel, arguments, poison, launches=10, repeats=7) -> float:
    """Median time of one launch over replays of a CUDA graph of `launches`; `poison` runs before each replay."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            kernel(*arguments)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        poison()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return sorted(times)[repeats // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=MANIFEST)
    parser.add_argument("--only", action="append", default=[], help="only cases with this in their label, and with all")
    parser.add_argument("--missing", action="store_true", help="only cases that the manifest does not have")
    parser.add_argument("--verbose", action="store_true", help="print each case's label before it runs")
    parser.add_argument("--arch", default="sm_80", help="target; the GPU present is embedded besides")
    options = parser.parse_args()
    indices = [i for i, case in enumerate(CASES) if all(text in case.label for text in options.only)]
    if options.missing:
        known = json.loads(MANIFEST.read_text())["cases"]
        indices = [i for i in indices if CASES[i].label not in known]
    cases = [CASES[i] for i in indices]
    folder = tempfile.mkdtemp()
    paths = [os.path.join(folder, f"{i}.so") for i in range(len(cases))]
    print(f"compiling {len(cases)} kernels", flush=True)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        hashes = list(pool.map(build, [(i, path, options.arch) for i, path in zip(indices, paths)]))

    import torch
    import tvm

    seed = int.from_bytes(os.urandom(4), "little")
    entries, failures = {}, []
    for i, (case, path) in enumerate(zip(cases, paths)):
        if options.verbose:
            print(case.label, flush=True)
        with watched(case.label):
            result = run(case, tvm.runtime.load_module(path)["main"], seed + i)
        if not result.pop("ok"):
            failures.append(case.label)
            print("FAIL", case.label, result, flush=True)
            continue
        entries[case.label] = {"source": hashes[i], **{key: float(f"{x:.4g}") for key, x in result.items()}}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if options.only or options.missing:  # the others stay as they are
        known = json.loads(MANIFEST.read_text())["cases"] | dict.fromkeys(failures) | entries
        entries = {case.label: known[case.label] for case in CASES if known.get(case.label)}
    manifest = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "date": datetime.date.today().isoformat(),
        "versions": {"tvm": tvm.__version__, "torch": torch.__version__},
        "seed": seed,
        "cases": entries,
    }
    print(f"{len(cases) - len(failures)} of {len(cases)} cases agree with PyTorch on {manifest['gpu']}, seed {seed}")
    Path(options.out).write_text(json.dumps(manifest, indent=1) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
