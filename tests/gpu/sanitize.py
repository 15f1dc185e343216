"""Run compute-sanitizer over a small case of every configuration that the model can choose.

usage: python tests/gpu/sanitize.py [--tool memcheck] [--tool racecheck …] [--only TEXT]   exit status 1 for any finding

Needs a GPU, and compute-sanitizer of the CUDA toolkit.  Kernels are compiled first, without it; then one process for
each tool runs every case under it, several split block rows and ragged edges among them.  Every tensor is an allocation
of its own, so that memcheck sees a read past its end; last comes a case whose work is for heads beyond the last, and
a run of memcheck that says nothing about it has not looked.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from attention_cases import Case, packed_views, problem  # noqa: E402
from verify import compile_case, make_inputs  # noqa: E402

from tir_kernels.attention.block_wise import cost as cuda_cost  # noqa: E402
from tir_kernels.attention.block_wise import kernel as block_wise_cuda  # noqa: E402
from tir_kernels.attention.block_wise.work import Item as WorkItem  # noqa: E402
from tir_kernels.attention.row_wise import kernel as row_wise_cuda  # noqa: E402
from tir_kernels.attention.warp_specialized import kernel as warp_specialized  # noqa: E402
from tir_kernels.attention.warp_specialized.work import Item  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ARCHES = ("sm_80", "sm_90a")
PLANTED = "planted: heads beyond the last"
PADDING = 1 << 16  # bytes between allocations
# The column of a kernel's first mask operand that holds the head.
HEAD_COLUMNS = {block_wise_cuda.NAME: WorkItem.HEAD, warp_specialized.NAME: Item.HEAD}
# (head size, value head size): the usual ones, one that is padded, and two that differ.
HEAD_SIZES = ((64, 64), (128, 128), (40, 40), (64, 128))


def cases() -> list[Case]:
    """Each configuration that may be chosen, with ragged lengths and with block rows that are split; and decoding."""
    targets = [parse_target(f"cuda -arch={arch}") for arch in ARCHES]
    found = [case for target in targets for case in _cases_for(target)]
    return list(dict.fromkeys(found))


def _cases_for(target) -> list[Case]:
    found = []
    for dim, v_dim in HEAD_SIZES:
        ragged = problem(150, 203, dim=dim, v_dim=v_dim)
        split = problem(70, 1500, dim=dim, v_dim=v_dim)
        for config in cuda_cost.shortlist(block_wise_cuda.configs(ragged, target)):
            found += [Case(ragged, config, "random"), Case(split, config, "longformer")]
        for config in _specialized(ragged, target):
            found += [Case(ragged, config, "random"), Case(split, config, "longformer")]
        decoding = problem(3, 2500, dim=dim, v_dim=v_dim, heads=4, kv_heads=2)
        found.append(Case(decoding, row_wise_cuda.configs(decoding, target)[0], "random"))
    packed = problem(150, heads=4, kv_heads=2, layouts=packed_views(1, 150, 4, 2, 64))
    for config in cuda_cost.shortlist(block_wise_cuda.configs(problem(150), target)):
        found.append(Case(problem(150, bias_shape=(1, 2, 150, 150)), config, "causal", "normal"))
        found.append(Case(packed, config, "window"))
        apart = replace(config, token_stride=3)
        found.append(Case(problem(150, gives_lse=True), apart, "dilated"))
        found.append(Case(problem(150, continues=True), apart, "dilated"))
        found.append(Case(problem(70, 1500, gives_lse=True, sink_dtype="float32"), config, "longformer"))
    for given, mask, bias in (
        (problem(150, bias_shape=(1, 2, 150, 150)), "causal", "normal"),
        (packed, "window", None),
        (problem(150, continues=True), "dilated", None),
        (problem(150), "empty-rows", None),
        (problem(70, 1500, gives_lse=True, sink_dtype="float32"), "longformer", None),
    ):
        found += [Case(given, config, mask, bias) for config in _specialized(given, target)]
    for given in (problem(150, 203, gives_lse=True), problem(150, continues=True)):
        found += [Case(given, replace(config, token_stride=4), "dilated") for config in _specialized(given, target)]
    decoding = problem(3, 2500, heads=4, kv_heads=2, gives_lse=True, sink_dtype="float32")
    found.append(Case(decoding, row_wise_cuda.configs(decoding, target)[0], "random"))
    return found


def _specialized(given, target) -> list:
    if warp_specialized.unsupported(given, target) is not None:
        return []
    return warp_specialized.worth_predicting(warp_specialized.configs(given, target))


def run(folder: Path, some: list[Case]) -> None:
    """Launch each case once, in this process: under the tool, as the child of `main`."""
    import torch
    import tvm

    kernels = [tvm.runtime.load_module(str(folder / f"{i}.so"))["main"] for i in range(len(some))]
    for i, case in enumerate(some):
        print(f"case {case.label}", flush=True)
        kernels[i](*_arguments(case, seed=i))
        torch.cuda.synchronize()
    planted = next(i for i, case in enumerate(some) if case.template.NAME in HEAD_COLUMNS)
    arguments, column = _arguments(some[planted], seed=0), HEAD_COLUMNS[some[planted].template.NAME]
    arguments[_first_mask_operand(some[planted].problem)][:, column] += some[planted].problem.q_heads
    print(f"case {PLANTED}", flush=True)
    kernels[planted](*arguments)
    torch.cuda.synchronize()


def _arguments(case: Case, seed: int) -> list:
    """All of the kernel's, in order."""
    import torch

    p = case.problem
    q, k, v, bias, counts, sink = make_inputs(case, seed)
    mask_operands = case.template.operands(p, case.config, parse_target(), case.block_sparse_mask()).arrays
    out = torch.empty(p.shape("out"), dtype=q.dtype, device="cuda")
    lse = [torch.empty(p.lse_shape, device="cuda")] if p.gives_lse else []
    earlier = [torch.zeros_like(out), torch.zeros(p.lse_shape, device="cuda")] if p.continues else []
    operands = [torch.from_numpy(array).cuda() for array in mask_operands]
    given = [x for x in (bias, counts, sink) if x is not None]
    return [q, k, v, *given, *earlier, *operands, out, *lse]


def _first_mask_operand(p) -> int:
    return 3 + (p.bias_shape is not None) + p.has_key_count + (p.sink_dtype is not None) + 2 * p.continues


def findings(output: str) -> dict[str, list[str]]:
    """The tool's messages about each case that has any."""
    found, label = {}, "before the first case"
    for line in output.splitlines():
        if line.startswith("case "):
            label = line.removeprefix("case ")
        elif re.match(r"=========\s+(Invalid|Race|Error|Warning|Barrier|Uninitialized|Program hit|Potential)", line):
            found.setdefault(label, []).append(line.removeprefix("=========").strip())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="memcheck by default; may be given again")
    parser.add_argument("--only", default="", help="only cases whose label holds this text")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    some = [case for case in cases() if options.only in case.label]
    if not any(case.template.NAME in HEAD_COLUMNS for case in some):
        parser.error(f"none of the {len(some)} cases with {options.only!r} can have an error planted")
    if options.run:
        run(options.run, some)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    folder, failed = Path(tempfile.mkdtemp()), False
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        paths = [str(folder / f"{i}.so") for i in range(len(some))]
        list(pool.map(compile_case, some, paths, [ARCHES[0]] * len(some)))
    for tool in options.tool or ["memcheck"]:
        command = [sanitizer, "--tool", tool, "--kernel-regex", "kns=main_kernel"]
        command += ["--padding", str(PADDING)] if tool == "memcheck" else []
        command += [sys.executable, __file__, "--run", str(folder), "--only", options.only]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        found = findings(done.stdout + done.stderr)
        planted = found.pop(PLANTED, [])
        checked = done.stdout.count("case ") - 1
        clean = not found and checked == len(some) and (bool(planted) or tool != "memcheck")
        failed |= not clean
        verdict = "clean" if clean else "NOT CLEAN"
        print(f"{tool}: {checked} of {len(some)} cases run, {len(found)} with findings: {verdict}")
        print(f"  the planted error: {planted[0] if planted else 'not reported'}")
        for label, messages in found.items():
            print(f"  {label}: {len(messages)} messages, the first: {messages[0]}")
        if not clean and not found:
            print((done.stdout + done.stderr)[-2000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
