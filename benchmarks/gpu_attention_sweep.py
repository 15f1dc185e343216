"""Times of every configuration of the CUDA kernels that walk blocks, over the attention grid: for the time model.

usage: python benchmarks/gpu_attention_sweep.py --out FILE [--only TEXT …] [--configs TEXT …] [--deadline-s S]

Kernels and mask operands are made by processes while the GPU times what is ready.  Medians over CUDA-graph replays, of
inputs that rotate past the L2 cache; every output is poisoned first and checked against float32.  One row a case, with
a median for each configuration; `fit_attention_model.py` reads them.  A mask that keeps multiples of a distance alone
is timed with blocks of tokens that far apart, too.

A GPU at its power limit lowers its clock, by less under kernels that use less power.  So the configurations near the
best are timed again, each at the clock that lasts.  The others' times are of the first round, which has no breaks: its
clock is that of a mixture of kernels.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.peers.cases import GRID_MASKS, GRID_SHAPES, Case, attention_case  # noqa: E402
from benchmarks.peers.results import write_rows  # noqa: E402
from tir_kernels.attention.block_wise import kernel as block_wise_cuda  # noqa: E402
from tir_kernels.attention.mask_forms import compile_mask  # noqa: E402
from tir_kernels.attention.problem import AttentionProblem  # noqa: E402
from tir_kernels.attention.warp_specialized import kernel as warp_specialized  # noqa: E402
from tir_kernels.masks.block_counts import FINEST  # noqa: E402
from tir_kernels.masks.token_strides import find_token_stride  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402

STAGES = (2,)
TEMPLATES = (block_wise_cuda, warp_specialized)
# Masks besides the grid's, of small batches.
OTHER_MASKS = ("sliding_window-32", "longformer-32", "bigbird-32")
# Besides the grid's: short inputs of heads of 128, other heads, and few heads.
OTHER_SHAPES = (
    *((1, 32, length, 128) for length in (512, 1024, 2048)),
    *((1, 16, length, dim) for length in (1024, 4096) for dim in (32, 80, 96, 192, 256)),
    (1, 1, 4096, 64),
    (1, 2, 8192, 128),
)
GRAPH_US = 1500.0  # a graph holds launches for about this long, of at most MAX_LAUNCHES
MAX_LAUNCHES = 64
SAMPLES = 7
NEAR_BEST = 1.25  # times the best time; such configurations are timed at the clock that lasts
WARM_UP_S = 0.1  # until the clock is the one that lasts


def problem_of(case: Case) -> AttentionProblem:
    dim = case.head_dim
    lengths = case.q_len, case.kv_len
    return AttentionProblem(case.batch, case.heads, case.kv_heads, *lengths, dim, dim, case.dtype, dim**-0.5)


def template_of(config):
    """The template that a configuration belongs to."""
    return next(t for t in TEMPLATES if isinstance(config, t.Config))


def configurations(problem: AttentionProblem, target, wanted: list[str], may_be_chosen: bool) -> list:
    """Those with `STAGES` stages, or those that the templates would predict; with one of the texts in their label."""
    found: list = []
    for template in TEMPLATES:
        if template.unsupported(problem, target) is None:
            configs = [c for c in template.configs(problem, target) if c.stages in STAGES]
            found += template.worth_predicting(configs) if may_be_chosen else configs
    return [c for c in found if any(text in c.label for text in wanted)]


def token_stride_of(case: Case) -> int:
    """The distance of which a mask keeps multiples alone; 1 where it keeps others, too."""
    from benchmarks.peers.patterns import Pattern

    mask = Pattern(case.mask, case.q_len, case.kv_len).stof_mask()
    found = find_token_stride(compile_mask(mask, problem_of(case), FINEST))
    return found.stride if found is not None and found.near == 0 else 1


def build(problem: AttentionProblem, config, folder: str) -> str:
    """Compile one kernel for the GPU present, as engines are: launched while the one before runs.

    Returns the path of its library.
    """
    import tvm

    from tir_kernels.compiling.quick_script import quick_script
    from tir_kernels.pipelines import pipeline_of

    target = parse_target("cuda")
    with quick_script():
        function = template_of(config).instantiate(problem, config, target).with_attr("global_symbol", "main")
    with target:
        executable = tvm.compile(tvm.IRModule({"main": function}), target=target, tir_pipeline=pipeline_of(target))
    name = config.label.replace(" ", "-").replace(",", "")
    path = os.path.join(folder, f"{problem.q_heads}-{problem.q_len}-{problem.head_dim}-{name}.so")
    executable.export_library(path)
    return path


def blocks_of(config) -> tuple[int, int, int]:
    """What operands are made for: rows and keys of a block, and how far apart its tokens are."""
    return config.block_m, config.block_n, config.token_stride


def operands(cases: list[Case], configs: list, arch: str) -> dict:
    """For each batch and configuration its operands, for each batch the mask's density.

    All configurations have the same blocks: one size, and tokens as far apart.
    """
    from benchmarks.peers.patterns import Pattern

    target, found = parse_target(f"cuda -arch={arch}"), {}
    for case in cases:
        problem = problem_of(case)
        *block, apart = blocks_of(configs[0])
        mask = compile_mask(Pattern(case.mask, case.q_len, case.kv_len).stof_mask(), problem, tuple(block), apart)
        made: dict = {}
        for config in configs:
            # Configurations of one template and one block size read the same arrays.
            key = template_of(config).NAME
            if key not in made:
                made[key] = template_of(config).operands(problem, config, target, mask)
            found[case.batch, config.label] = made[key]
        found[case.batch] = mask.density
    return found


class Inputs:
    """Sets of q, k, v and out for the largest batch of a length, overlapping, so that smaller batches use them too."""

    def __init__(self, shape: tuple[int, ...], smallest_batch: int):
        import torch

        cache = torch.cuda.get_device_properties(0).L2_cache_size
        entry_bytes = 4 * 2 * int(np.prod(shape[1:]))
        self.batch = shape[0]
        self.in_cache = 3 * cache / entry_bytes  # batch entries that rotate past the cache
        entries = self.batch + min(int(self.in_cache) + 1, 64 * smallest_batch)
        self.q, self.k, self.v, self.out = (
            torch.randn(entries, *shape[1:], device="cuda", dtype=torch.float16) for _ in range(4)
        )

    def sets(self, batch: int) -> list[list]:
        count = max(1, min(int(self.in_cache / batch) + 1, 64, (len(self.q) - self.batch) // batch + 1))
        starts = [i * batch for i in range(count)]
        return [[x[s : s + self.batch] for x in (self.q, self.k, self.v, self.out)] for s in starts]


class Launches:
    """A CUDA graph of launches of one kernel, with the sets of inputs taking turns."""

    def __init__(self, kernel, sets: list[list], arrays: list):
        self.kernel, self.sets, self.arrays = kernel, sets, arrays
        self._capture(1)
        self._capture(max(2, min(MAX_LAUNCHES, int(GRAPH_US / self._replay_us()))))

    def _capture(self, launches: int) -> None:
        import torch

        self.launches, self.graph = launches, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _, (q, k, v, out) in zip(range(launches), itertools.cycle(self.sets)):
                self.kernel(q, k, v, *self.arrays, out)

    def _replay_us(self) -> float:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / self.launches

    def median_us(self, warm_up_s: float = 0.0) -> float:
        """Median microseconds of one launch, after replays for so many seconds, and at least one."""
        start = time.monotonic()
        self._replay_us()
        while time.monotonic() - start < warm_up_s:
            self._replay_us()
        return sorted(self._replay_us() for _ in range(SAMPLES))[SAMPLES // 2]


def measure(case: Case, inputs: Inputs, kernels: dict, prepared: dict, reference) -> dict:
    """The row of one case: the median of each configuration; wrong results are an error."""
    import torch

    found, density = {}, None
    sets = inputs.sets(case.batch)
    for config, kernel in kernels.items():
        if blocks_of(config) not in prepared:  # another mask's
            continue
        some = prepared[blocks_of(config)]
        density, taken = some[case.batch], some[case.batch, config.label]
        arrays = [torch.from_numpy(array).cuda() for array in taken.constants]
        arrays += [torch.zeros(shape, dtype=getattr(torch, kind), device="cuda") for shape, kind in taken.workspace]
        q, k, v, out = sets[0]
        out[: case.batch] = float("nan")
        kernel(q, k, v, *arrays, out)
        error = reference.error(out[: case.batch])
        if not error <= 2 * reference.half_error:
            raise SystemExit(f"{case.label} {config.label}: error {error}, PyTorch's in half {reference.half_error}")
        found[config.label] = Launches(kernel, sets, arrays)
    medians = {label: launches.median_us() for label, launches in found.items()}
    near = [label for label, us in medians.items() if us < NEAR_BEST * min(medians.values())]
    us = medians | {label: found[label].median_us(WARM_UP_S) for label in near}
    return {"case": case.to_json(density), "median_us": {label: float(f"{x:.4g}") for label, x in us.items()}}


def main() -> int:
    options = parse_arguments()
    import torch
    import tvm

    from benchmarks.peers.accuracy import Reference
    from benchmarks.peers.patterns import Pattern

    start, facts, target = time.monotonic(), provenance(options), parse_target("cuda")
    folder, rows, not_timed = tempfile.mkdtemp(), [], 0
    cases = [attention_case(*shape, mask) for shape in (*GRID_SHAPES, *OTHER_SHAPES) for mask in ("none", *GRID_MASKS)]
    cases += [attention_case(*shape, mask) for shape in GRID_SHAPES if shape[0] <= 8 for mask in OTHER_MASKS]
    cases = [case for case in cases if any(text in case.label for text in options.only)]
    groups = {}  # what shares kernels: all batches and masks of a length
    for case in cases:
        groups.setdefault((case.heads, case.q_len, case.head_dim), []).append(case)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        jobs = {key: submit(pool, group, target, options, folder) for key, group in groups.items()}
        for key, group in groups.items():
            largest, libraries, prepared = jobs.pop(key)
            if time.monotonic() - start > options.deadline_s:
                not_timed += len(group)
                continue
            kernels = {c: tvm.runtime.load_module(library.result())["main"] for c, library in libraries.items()}
            inputs = Inputs(problem_of(largest).shape("q"), min(case.batch for case in group))
            for case in sorted(group, key=lambda case: case.mask):
                keep = Pattern(case.mask, case.q_len, case.kv_len, "cuda").rows
                q, k, v = (x[: case.batch] for x in (inputs.q, inputs.k, inputs.v))
                operands_of = {block: future.result() for block, future in prepared[case.mask].items()}
                row = measure(case, inputs, kernels, operands_of, Reference(q, k, v, keep))
                rows.append({"bench": "configurations", **facts, **row})
                best = min(row["median_us"], key=row["median_us"].get)
                print(f"{time.monotonic() - start:5.0f} s {case.label}: {row['median_us'][best]} µs {best}", flush=True)
            write_rows(options.out, rows)
            del inputs, kernels
            torch.cuda.empty_cache()
        pool.shutdown(cancel_futures=True)
    print(f"{len(rows)} cases, {not_timed} left out: out of time")
    return int(bool(not_timed))


def submit(pool, group: list[Case], target, options, folder) -> tuple[Case, dict, dict[str, dict[tuple, Future]]]:
    """(case of the largest batch, its kernel of each configuration, operands of each mask and kind of block)."""
    largest = max(group, key=lambda case: case.batch)
    problem = problem_of(largest)
    configs = configurations(problem, target, options.configs, options.may_be_chosen)
    arch = str(target.attrs["arch"])
    libraries, prepared = {}, {}
    for mask in dict.fromkeys(case.mask for case in group):
        these, blocks = [case for case in group if case.mask == mask], {}
        apart = token_stride_of(these[0])
        strided = [replace(c, token_stride=apart) for c in configs if template_of(c).TAKES_TOKEN_STRIDES]
        for config in configs + strided * (apart > 1):
            blocks.setdefault(blocks_of(config), []).append(config)
            if config not in libraries:
                libraries[config] = pool.submit(build, problem, config, folder)
        prepared[mask] = {key: pool.submit(operands, these, some, arch) for key, some in blocks.items()}
    return largest, libraries, prepared


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the rows to this file")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--configs", nargs="+", default=[""], help="the same for labels of configurations")
    parser.add_argument("--may-be-chosen", action="store_true", help="only configurations that the model may choose")
    parser.add_argument("--deadline-s", default=240.0, type=float, help="seconds after which no further length starts")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
