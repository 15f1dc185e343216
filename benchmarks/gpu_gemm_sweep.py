"""Time every given configuration of the CUDA matrix-product kernels, beside cuBLAS: what `gemm_cost` is fitted to.

usage: python benchmarks/gpu_gemm_sweep.py --out sweep.json --suite NAME … [--peers NAME …]

Kernels are built by a pool of processes, checked against PyTorch in float32, then timed: CUDA-graph replay, inputs
rotating past the L2 cache, median.  The suites are in `gemm_suites.py`; the default configuration comes besides.
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

    from tir_kernels.quick_script import quick_script
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


def measure(template, problem, config, path, sets, expected, half_error) -> dict:
    """Error and time of a built kernel on `sets` of inputs, whose first gives `expected`."""
    import torch
    import tvm

    dtype = getattr(torch, problem.dtype)
    kernel = tvm.runtime.load_module(path)["main"]
    workspace = [
        torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        for shape, kind in template_named(template).workspace(problem, config)
    ]
    calls, outputs = [], []
    for inputs in sets:
        n_outputs = 1 + problem.keeps_sum
        out = [torch.full((problem.m, problem.n), float("nan"), dtype=dtype, device="cuda") for _ in range(n_outputs)]
        outputs.append(out)
        calls.append(functools.partial(kernel, *inputs, *workspace, *out))
    calls[0]()
    torch.cuda.synchronize()
    error = max(float((x.float() - y).abs().max()) for x, y in zip(outputs[0], expected))
    row = {"error": error, "half_error": half_error, "ok": error <= 2 * half_error}
    if row["ok"]:
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


def print_table(jobs, rows):
    """A line a template and problem: best and default configuration, cuBLAS, cuBLAS and an elementwise kernel."""
    times = {(row["template"], row["problem"], row["label"]): row["us"] for row in rows if "us" in row}
    print("| m×n×k | best | us | TFLOP/s | default | us | cuBLAS us | cuBLAS + rest us |\n|" + "---|" * 8)
    for template, problem in dict.fromkeys(job[:2] for job in jobs):
        ours = {label: us for (name, text, label), us in times.items() if (name, text) == (template, repr(problem))}
        best, default = min(ours, key=ours.get), default_config(template, problem).label
        sizes, rate = f"{problem.m}×{problem.n}×{problem.k}", 2 * problem.m * problem.n * problem.k / ours[best] / 1e6
        columns = [sizes, best, f"{ours[best]:.2f}", f"{rate:.0f}", default]
        others = [ours.get(default), *(times.get((name, repr(problem), name)) for name in PEERS)]
        columns += [f"{us:.2f}" if us else "" for us in others]
        print("|", " | ".join(columns), "|")


def peers(names, problem, sets) -> dict:
    """Microseconds of cuBLAS alone, or of cuBLAS and one compiled elementwise kernel."""
    import torch
    from gemm_cases import torch_rest

    def product(inputs):
        w = inputs[1]
        return inputs[0] @ (w.T if problem.w_layout == "nk" else w)

    torch._dynamo.reset()
    rest = torch.compile(functools.partial(torch_rest, problem), dynamic=False)
    systems = {
        "cublas": lambda inputs: product(inputs),
        "cublas+rest": lambda inputs: rest(product(inputs), *inputs[2:]),
    }
    rows = {}
    for name in names:
        system = systems[name]
        system(sets[0])
        torch.cuda.synchronize()
        rows[name] = median_us([functools.partial(system, inputs) for inputs in sets])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--suite", nargs="+", required=True)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    options = parser.parse_args()

    from gemm_suites import SUITES

    jobs = [job for suite in options.suite for job in SUITES[suite]()]
    jobs = list(dict.fromkeys(jobs + [(*job[:2], default_config(*job[:2])) for job in jobs]))
    folder, start = tempfile.mkdtemp(), time.time()
    paths = [os.path.join(folder, f"{i}.so") for i in range(len(jobs))]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        refusals = list(pool.map(build, zip(jobs, paths)))
    print(f"{len(jobs)} kernels built in {time.time() - start:.0f} s", flush=True)

    from gemm_cases import make_inputs, torch_sequence

    from benchmarks.peers.timing import input_sets
    from tir_kernels.fusion.gemm_geometry import operand_bytes

    rows = []
    for problem in dict.fromkeys(problem for _, problem, _ in jobs):
        n_sets = input_sets(operand_bytes(problem), operand_bytes(problem), "cuda")
        sets = [make_inputs(problem, int.from_bytes(os.urandom(4), "little")) for _ in range(min(n_sets, 24))]
        expected = torch_sequence(problem, *(x.float() for x in sets[0]))
        half_error = max(
            float((x.float() - y).abs().max()) for x, y in zip(torch_sequence(problem, *sets[0]), expected)
        )
        flops = 2 * problem.m * problem.n * problem.k
        best = {}
        for job, path, refusal in zip(jobs, paths, refusals):
            if job[1] != problem:
                continue
            template, _, config = job
            row = {"template": template, "problem": repr(problem), "config": repr(config), "label": config.label}
            arguments = template, problem, config, path, sets, expected, half_error
            row |= {"failed": refusal} if refusal else measured(*arguments)
            rows.append(row)
            if "us" not in row:
                print("FAIL", row, flush=True)
            else:
                best[f"{template} {config.label}"] = row["us"]
        others = peers(options.peers, problem, sets)
        where = {"problem": repr(problem), "config": ""}
        rows += [{"template": name, "label": name, "us": us, **where} for name, us in others.items()]
        kinds = "+".join(s.kind for s in problem.steps) + (f"+{problem.norm.kind}" if problem.norm else "")
        print(f"m {problem.m} n {problem.n} k {problem.k} {kinds} {problem.w_layout} ({time.time() - start:.0f} s)")
        fastest = sorted(best.items(), key=lambda x: x[1])[:6]
        for label, us in [*fastest, *others.items()]:
            tflops, gbs = flops / us / 1e6, operand_bytes(problem) / us / 1e3
            rates = f"{tflops:6.0f} TFLOP/s {tflops / PEAK_TFLOPS:5.2f} {gbs:6.0f} GB/s"
            print(f"  {label:44s} {us:9.2f} us {rates}", flush=True)
        Path(options.out).write_text(json.dumps(rows))
    print_table(jobs, rows)
    failed = sum("us" not in row for row in rows)
    print(f"{len(rows)} rows, {failed} failed, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
