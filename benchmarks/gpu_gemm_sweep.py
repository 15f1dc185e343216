"""Time every given configuration of the CUDA matrix-product kernels, beside cuBLAS: what `sizes/cost.py` is fitted to.

usage: python benchmarks/gpu_gemm_sweep.py --out sweep.json --suite NAME … [--peers NAME …] [--between]

Kernels are built by a pool of processes, checked against PyTorch in float32, then timed: CUDA-graph replay, inputs
rotating past the L2 cache, median.  The suites are in `gemm_suites.py`; the default configuration comes besides.

With --between, a copy before each product writes its rows and one after it reads its result, as in a model; their time
is taken off.  A GPU that multiplies without a pause is at its power limit, where tiles have another order.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "gpu")]

PEAK_TFLOPS = 790
TARGET = "cuda -arch=sm_90a"
PEERS = ("cublas", "cublas+rest")


def build(job):
    """Compile a kernel to a shared library; its path, or the reason why not."""
    import tvm

    from tir_kernels.compiling.quick_script import quick_script
    from tir_kernels.target import parse_target

    (template, problem, config), path = job
    target = parse_target(TARGET)
    try:
        with quick_script():
            func = template_named(template).instantiate(problem, config, target).with_attr("global_symbol", "main")
        with target:
            tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx").export_library(path)
    except Exception as error:
        return str(error)[-600:]
    return None


def template_named(name: str):
    from tir_kernels.fusion.registry import TEMPLATES

    return next(t for t in TEMPLATES if t.NAME == name)


def median_us(calls) -> float:
    """Median microseconds of one call, of graphs in which the calls take turns."""
    from benchmarks.peers.timing import device_samples_us

    return statistics.median(device_samples_us(calls, "cuda"))


def copies_around(problem, sets):
    """The copies between which a problem's kernels are timed."""
    import torch

    from benchmarks.products.between import Between

    ((shape, dtype),) = problem.outputs
    result = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    return Between([inputs[0] for inputs in sets], result)


def measure(template, problem, config, path, sets, between, expected, half_error) -> dict:
    """Error and time of a built kernel on `sets` of inputs, whose first gives `expected`."""
    import torch
    import tvm

    from tir_kernels.target import parse_target

    dtype = getattr(torch, problem.dtype)
    kernel = tvm.runtime.load_module(path)["main"]
    workspace = [
        torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        for shape, kind in template_named(template).operands(problem, config, parse_target(TARGET)).workspace
    ]
    calls, outputs = [], []
    for inputs in sets:
        out = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape, _ in problem.outputs]
        outputs.append(out)
        calls.append(functools.partial(kernel, *inputs, *workspace, *out))
    calls[0]()
    torch.cuda.synchronize()
    error = max(float((x.float() - y).abs().max()) for x, y in zip(outputs[0], expected))
    row = {"error": error, "half_error": half_error, "ok": error <= 2 * half_error}
    if row["ok"] and between is not None:
        row["us"] = median_us(between.around(calls, [out[0] for out in outputs])) - between.us
    elif row["ok"]:
        row["us"] = median_us(calls)
    return row


def measured(*arguments) -> dict:
    """What `measure` gives, or why the kernel does not start."""
    try:
        return measure(*arguments)
    except Exception as error:
        return {"failed": str(error)[-600:]}


def default_config(template: str, problem):
    from tir_kernels.target import parse_target

    return template_named(template).configs(problem, parse_target(TARGET))[0]


def products_of(problem) -> list:
    """The two of an MlpProblem, the one of any other."""
    return [problem.first, problem.second] if hasattr(problem, "first") else [problem]


def sizes_of(problem) -> str:
    return " and ".join(f"{one.m}×{one.n}×{one.k}" for one in products_of(problem))


def flops_of(problem) -> int:
    return sum(2 * one.m * one.n * one.k for one in products_of(problem))


def print_table(jobs, rows):
    """A line a template and problem: best and default configuration, cuBLAS, cuBLAS and an elementwise kernel."""
    times = {(row["template"], row["problem"], row["label"]): row["us"] for row in rows if "us" in row}
    print("| m×n×k | best | us | TFLOP/s | default | us | cuBLAS us | cuBLAS + rest us |\n|" + "---|" * 8)
    for template, problem in dict.fromkeys(job[:2] for job in jobs):
        ours = {label: us for (name, text, label), us in times.items() if (name, text) == (template, repr(problem))}
        best, default = min(ours, key=ours.get), default_config(template, problem).label
        sizes, rate = sizes_of(problem), flops_of(problem) / ours[best] / 1e6
        columns = [sizes, best, f"{ours[best]:.2f}", f"{rate:.0f}", default]
        others = [ours.get(default), *(times.get((name, repr(problem), name)) for name in PEERS)]
        columns += [f"{us:.2f}" if us else "" for us in others]
        print("|", " | ".join(columns), "|")


def peers(names, problem, sets, between) -> dict:
    """Microseconds of cuBLAS alone, or of cuBLAS and one compiled elementwise kernel after each product.

    They are timed as ours: with `between`, between the same copies.
    """
    import torch
    from gemm_cases import torch_rest

    torch._dynamo.reset()
    products = products_of(problem)
    rests = [torch.compile(functools.partial(torch_rest, one), dynamic=False) for one in products]

    def run(inputs, rests):
        x, *inputs = inputs
        for one, rest in zip(products, rests):
            w, *operands = inputs[: len(one.inputs) - 1]
            x = rest(x @ (w.T if one.w_layout == "nk" else w), *operands)[0]
            inputs = inputs[len(one.inputs) - 1 :]
        return x

    alone = [lambda x, *operands: (x,)] * len(products)
    systems = {"cublas": lambda inputs: run(inputs, alone), "cublas+rest": lambda inputs: run(inputs, rests)}
    rows = {}
    for name in names:
        calls = [functools.partial(systems[name], inputs) for inputs in sets]
        calls[0]()
        torch.cuda.synchronize()
        rows[name] = median_us(calls) if between is None else median_us(between.around(calls)) - between.us
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--suite", nargs="+", required=True)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--between", action="store_true", help="time products between copies, as in a model")
    options = parser.parse_args()

    from gemm_suites import SUITES

    jobs = [job for suite in options.suite for job in SUITES[suite]()]
    jobs = list(dict.fromkeys(jobs + [(*job[:2], default_config(*job[:2])) for job in jobs]))
    folder, start = tempfile.mkdtemp(), time.time()
    paths = [os.path.join(folder, f"{i}.so") for i in range(len(jobs))]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        refusals = list(pool.map(build, zip(jobs, paths)))
    print(f"{len(jobs)} kernels built in {time.time() - start:.0f} s", flush=True)

    from gemm_cases import GemmCase
    from mlp_cases import MlpCase

    from benchmarks.peers.timing import input_sets
    from tir_kernels.fusion.gemm.sizes.geometry import operand_bytes
    from tir_kernels.fusion.mlp.cost import mlp_bytes

    rows = []
    for problem in dict.fromkeys(problem for _, problem, _ in jobs):
        is_mlp = len(products_of(problem)) > 1
        case = MlpCase(problem, None) if is_mlp else GemmCase(None, problem, None)
        n_bytes, flops = (mlp_bytes if is_mlp else operand_bytes)(problem), flops_of(problem)
        n_sets = input_sets(n_bytes, n_bytes, "cuda")
        sets = [case.make_inputs(int.from_bytes(os.urandom(4), "little")) for _ in range(min(n_sets, 24))]
        expected = case.torch_sequence(*(x.float() for x in sets[0]))
        half_error = max(float((x.float() - y).abs().max()) for x, y in zip(case.torch_sequence(*sets[0]), expected))
        between = copies_around(problem, sets) if options.between else None
        best = {}
        for job, path, refusal in zip(jobs, paths, refusals):
            if job[1] != problem:
                continue
            template, _, config = job
            row = {"template": template, "problem": repr(problem), "config": repr(config), "label": config.label}
            arguments = template, problem, config, path, sets, between, expected, half_error
            row |= {"failed": refusal} if refusal else measured(*arguments)
            rows.append(row)
            if "us" not in row:
                print("FAIL", row, flush=True)
            else:
                best[f"{template} {config.label}"] = row["us"]
        others = peers(options.peers, problem, sets, between)
        where = {"problem": repr(problem), "config": ""}
        rows += [{"template": name, "label": name, "us": us, **where} for name, us in others.items()]
        last = products_of(problem)[-1]
        kinds = "+".join(s.kind for s in last.steps) + (f"+{last.norm.kind}" if last.norm else "")
        print(f"{sizes_of(problem)} {kinds} {last.w_layout} ({time.time() - start:.0f} s)")
        fastest = sorted(best.items(), key=lambda x: x[1])[:6]
        for label, us in [*fastest, *others.items()]:
            tflops, gbs = flops / us / 1e6, n_bytes / us / 1e3
            rates = f"{tflops:6.0f} TFLOP/s {tflops / PEAK_TFLOPS:5.2f} {gbs:6.0f} GB/s"
            print(f"  {label:44s} {us:9.2f} us {rates}", flush=True)
        Path(options.out).write_text(json.dumps(rows))
    print_table(jobs, rows)
    failed = sum("us" not in row for row in rows)
    print(f"{len(rows)} rows, {failed} failed, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
