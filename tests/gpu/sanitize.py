"""Run compute-sanitizer over a small case of every configuration that the model can choose.

usage: python tests/gpu/sanitize.py [--tool memcheck] [--tool racecheck …] [--only TEXT]   exit status 1 for any finding

Needs a GPU, and compute-sanitizer of the CUDA toolkit.  Kernels are compiled first, without it; then one process for
each tool runs every case under it, several split block rows and ragged edges among them.
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
from verify import build, make_inputs  # noqa: E402

from tir_kernels.attention import block_wise_cuda, cuda_cost, row_wise_cuda  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ARCH = "sm_80"
# (head size, value head size): the usual ones, one that is padded, and two that differ.
HEAD_SIZES = ((64, 64), (128, 128), (40, 40), (64, 128))


def cases() -> list[Case]:
    """Each configuration that may be chosen, with ragged lengths and with block rows that are split; and decoding."""
    target, found = parse_target(f"cuda -arch={ARCH}"), []
    for dim, v_dim in HEAD_SIZES:
        ragged = problem(150, 203, dim=dim, v_dim=v_dim)
        split = problem(70, 1500, dim=dim, v_dim=v_dim)
        for config in cuda_cost.shortlist(block_wise_cuda.configs(ragged, target)):
            found += [Case(ragged, config, "random"), Case(split, config, "longformer")]
        decoding = problem(3, 2500, dim=dim, v_dim=v_dim, heads=4, kv_heads=2)
        found.append(Case(decoding, row_wise_cuda.configs(decoding, target)[0], "random"))
    packed = problem(150, heads=4, kv_heads=2, layouts=packed_views(1, 150, 4, 2, 64))
    for config in cuda_cost.shortlist(block_wise_cuda.configs(problem(150), target)):
        found.append(Case(problem(150, bias_shape=(1, 2, 150, 150)), config, "causal", "normal"))
        found.append(Case(packed, config, "window"))
        found.append(Case(problem(150, gives_lse=True), replace(config, token_stride=3), "dilated"))
    return list(dict.fromkeys(found))


def run(folder: Path, some: list[Case]) -> None:
    """Launch each case once, in this process: under the tool, as the child of `main`."""
    import torch
    import tvm

    for i, case in enumerate(some):
        kernel = tvm.runtime.load_module(str(folder / f"{i}.so"))["main"]
        print(f"case {case.label}", flush=True)
        p = case.problem
        q, k, v, bias = make_inputs(case, seed=i)
        mask_operands = case.template.mask_operands(case.block_sparse_mask(), p)
        operands = [torch.from_numpy(array).cuda() for array in mask_operands]
        out = torch.empty(p.shape("out"), dtype=q.dtype, device="cuda")
        lse = [torch.empty(p.lse_shape, device="cuda")] if p.gives_lse else []
        kernel(q, k, v, *([] if bias is None else [bias]), *operands, out, *lse)
        torch.cuda.synchronize()


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
    if options.run:
        run(options.run, some)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    folder, failed = Path(tempfile.mkdtemp()), False
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, [(case, str(folder / f"{i}.so"), ARCH) for i, case in enumerate(some)]))
    for tool in options.tool or ["memcheck"]:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "7", "--kernel-regex", "kns=main_kernel"]
        command += [sys.executable, __file__, "--run", str(folder), "--only", options.only]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = findings(done.stdout + done.stderr)
        checked = done.stdout.count("case ")
        clean = done.returncode == 0 and not found and checked == len(some)
        failed |= not clean
        verdict = "clean" if clean else "NOT CLEAN"
        print(f"{tool}: {checked} of {len(some)} cases run, {len(found)} with findings: {verdict}")
        for label, messages in found.items():
            print(f"  {label}: {len(messages)} messages, the first: {messages[0]}")
        if done.returncode and not found:
            print((done.stdout + done.stderr)[-2000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
