"""Compile every CUDA kernel configuration for sm_80 and sm_90a and write what ptxas says of each to `compiled.json`.

usage: python tests/gpu/compile_all.py      needs nvcc but no GPU; exit status 1 if one needs too many registers

The record is keyed by the hash of the source: sources that are in it are not compiled again, and those that no case
generates any more are dropped.  Interrupted, it keeps what was compiled.  A whole run also notes what all sources were
generated from: while that is as it was, the tests generate some of them only.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import all_cases  # noqa: E402
from attention_cases import DEFAULT, source_hash, specialized  # noqa: E402
from compile_only_cases import compile_only_cases  # noqa: E402
from sources import architectures, distinct, fingerprint, launch_bounds, source_of  # noqa: E402

from tir_kernels.attention.warp_specialized.geometry import Geometry  # noqa: E402
from tir_kernels.cuda.compile import NVCC_FLAGS, resource_usage  # noqa: E402

RECORD = Path(__file__).with_name("compiled.json")
FIGURES = ["registers", "spill_bytes", "stack_bytes", "static_shared_bytes", "serialized_wgmma"]
REGISTERS = 65536  # of a multiprocessor


def one_of_each_configuration(cases) -> list:
    """The first case of each configuration without deferred norms, that reads statistics and that writes them, without
    a sink and with one, without a softcap and with one, or a key count, in 16 bits and in each mode of float32, and
    whatever else attention's default one is asked to do.

    The warp-specialized kernel's registers are fixed, whatever its head: so each head, with a bias, continued, and with
    two maps of an operand, between which the thread that copies chooses.
    """
    first = {}
    for case in distinct(cases):
        strided = getattr(case.config, "token_stride", 1) > 1
        config = replace(case.config, token_stride=1) if strided else case.config
        mode = getattr(case.problem, "float32", None) if case.problem.dtype == "float32" else None
        deferred = [
            getattr(case.problem, name, None)
            for name in ("a_norm", "statistics", "sink_dtype", "softcap", "key_counts")
        ]
        if case.template is specialized:
            p = case.problem
            deferred += [p.bias_shape, p.continues, Geometry(p, case.config).chooses_maps]
            config = config, p.head_dim, p.v_head_dim
        first.setdefault((case.template.NAME, config, mode, *map(bool, deferred)), case)
    return list(dict.fromkeys([*first.values(), *(case for case in distinct(cases) if case.config == DEFAULT)]))


CASES = one_of_each_configuration(all_cases.CASES) + distinct(compile_only_cases())


def compiler() -> dict:
    """What decides the figures besides the source."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return {"nvcc": re.search(r"V(\d+\.\d+\.\d+)", version)[1], "flags": list(NVCC_FLAGS)}


def figures(source: str, arch: str) -> list[int]:
    """Resource usage of the kernel in `source`, in the order of FIGURES."""
    (usage,) = resource_usage(source, arch)
    return [int(getattr(usage, name)) for name in FIGURES]


def may_spill(case) -> int:
    """Bytes that a case's kernel may spill.

    Two warpgroups with outputs of more than 192 columns spill numbers of a block row outside of the loops over blocks.
    The tiles that spill nothing are 15 to 20 % slower on an H200.
    """
    if case.template is not specialized:
        return 0
    wide = case.problem.v_head_dim > 192 and case.config.block_m > 64
    return 160 if wide else 0


def why_not(source: str, entry: dict[str, list[int]], allowed_spill: int = 0) -> str | None:
    """What is wrong with a source's figures: registers are spilled, or do not suffice for the CTAs that it promises, or
    wgmma is serialized."""
    threads, ctas = launch_bounds(source)
    for arch, found in entry.items():
        found = dict(zip(FIGURES, found))
        spills = found["spill_bytes"] > allowed_spill
        if spills or found["serialized_wgmma"] or ctas * threads * found["registers"] > REGISTERS:
            return f"{arch}: {ctas} CTAs of {threads} threads, {found}"
    return None


def add(index: int, known: dict) -> tuple[str, dict[str, list[int]], str | None]:
    """Hash of the source of CASES[index], its figures for each of its architectures, compiled where `known` has none,
    and what is wrong with them."""
    case = CASES[index]  # not passed itself: the modules that cases name cannot be sent to another process
    source = source_of(case)
    key = source_hash(source)
    so_far = known.get(key, {})
    entry = {arch: so_far[arch] if arch in so_far else figures(source, arch) for arch in architectures(case)}
    return key, entry, why_not(source, entry, may_spill(case))


def read(path: Path = RECORD) -> dict:
    return json.loads(path.read_text())


def write(record: dict, path: Path = RECORD):
    """One line a source, so that a change of one kernel is a change of few lines."""
    others = {key: value for key, value in record.items() if key != "sources"}
    *head, _ = json.dumps({**others, "sources": {}}, indent=1).rsplit("{}", 1)
    lines = ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(record["sources"].items()))
    path.write_text("".join(head) + "{\n" + lines + "\n }\n}\n")


def main() -> int:
    record = {**compiler(), "figures": FIGURES, "sources": {}}
    earlier = read() if RECORD.exists() else {}
    same_compiler = all(earlier.get(name) == record[name] for name in ("nvcc", "flags", "figures"))
    known = earlier["sources"] if same_compiler else {}
    wrong = {}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(add, i, known) for i in range(len(CASES))]
        for n, future in enumerate(as_completed(pending), 1):
            key, entry, why = future.result()
            # Cases of one source may be compiled for different architectures.
            record["sources"][key] = dict(sorted((record["sources"].get(key, {}) | entry).items()))
            if why is not None:
                wrong[key] = why
            if n % 10 == 0:
                write({**record, "sources": known | record["sources"]})
                print(f"{n} of {len(CASES)}")
    write({**record, "generated_from": fingerprint()} if not wrong else record)
    print(f"{len(record['sources'])} sources, {len(wrong)} of them wrong", *map(str, wrong.items()), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
