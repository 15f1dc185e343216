"""Documents on a row: their lists against the masks that NumPy compiles; the generated CUDA run on the CPU."""

import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

from stof_tvm.packed.layout import layout_of_lengths
from tests.tir_kernels.attention.block_maps.emulated import TARGET, emulated
from tests.tir_kernels.attention.cuda_emulator import aligned
from tir_kernels.attention.block_maps.order import THREADS as ORDER_THREADS
from tir_kernels.attention.block_maps.order import grid_size
from tir_kernels.attention.block_wise import kernel as block_wise
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.block_wise.operands import lane_keep_bits
from tir_kernels.attention.documents import keep_words, listing, tokens
from tir_kernels.attention.documents.plan import document_plan
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import WarpSpecializedConfig
from tir_kernels.cuda import device
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
POISON = 0x7FFFFFFF
LENGTHS = [(70, 1, 33, 128), (1,), (200, 56), (128, 128), (1,) * 250, (3, 200, 2, 1, 49), (256,)]


@dataclass(frozen=True)
class Case:
    template: object
    config: object
    row: int
    longest: int
    keeps: str = ""  # the mask inside of documents


CASES = {
    "specialized": Case(specialized, WarpSpecializedConfig(64, 64, 2), 256, 256),
    "specialized, causal": Case(specialized, WarpSpecializedConfig(128, 128, 2), 320, 256, "causal"),
    "specialized, band": Case(specialized, WarpSpecializedConfig(64, 128, 2), 448, 256, "window"),
    "block-wise": Case(block_wise, BlockWiseConfig(64, 32, 4, 2), 256, 256),
    "block-wise, holes": Case(block_wise, BlockWiseConfig(16, 32, 1, 2), 272, 256, "holes"),
    "block-wise, wide, never itself": Case(block_wise, BlockWiseConfig(128, 96, 8, 2), 320, 300, "never itself"),
}


def kept_distances(name, longest):
    distance = np.arange(1 - longest, longest)
    return {
        "causal": distance <= 0,
        "window": abs(distance) <= 40,
        "holes": (distance % 3 == 0) & (distance < 90),
        "never itself": distance != 0,
    }.get(name)


def problem(row, heads=3):
    return AttentionProblem(1, heads, 1, row, row, 16, 16, "float16", 0.25, block_map=BlockMap(1, 1, 1920, 1920))


@pytest.fixture(scope="module")
def tokens_kernel(tmp_path_factory):
    return emulated(tokens.tokens(), tmp_path_factory.mktemp("tokens"), "tokens")


def run_tokens(kernel, layout, row, sequences):
    names = "first", "place", "number", "taken"
    arrays = {name: aligned(np.full(row, POISON, np.int64)) for name in names}
    arrays |= {name: aligned(np.full(sequences, POISON, np.int64)) for name in ("starts", "ends")}
    arrays["bounds"] = aligned(np.full((row, 2), POISON, np.int32))
    arrays["documents"] = aligned(layout.documents())
    sizes = {"n_documents": len(arrays["documents"]), "n_tokens": row, "n_starts": sequences}
    sizes |= {"cse_v1": 2 * len(arrays["documents"]), "cse_v2": row + sequences}
    kernel(arrays, sizes, range(-(-(row + sequences) // tokens.THREADS)), tokens.THREADS, 0)
    return arrays


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("is_left", [False, True])
def test_vectors_are_those_of_the_layout(lengths, is_left, tokens_kernel):
    width = max(lengths) + 5
    layout = layout_of_lengths(lengths, len(lengths), width)
    if is_left:
        layout = replace(layout, offsets=tuple(width - n for n in lengths))
    for row in (sum(lengths), sum(lengths) + 37):
        found = run_tokens(tokens_kernel, layout, row, 300)
        wanted = layout.vectors(row, 300)
        for name in ("place", "number", "first", "starts", "ends"):
            np.testing.assert_array_equal(found[name], wanted[f"stof_{name}"], err_msg=name)
        places = layout.places()
        np.testing.assert_array_equal(found["taken"][: len(places)], places)
        assert (found["taken"][len(places) :] == places[-1]).all()


class Planned:
    def __init__(self, case, folder):
        self.case, self.p = case, problem(case.row)
        keeps = kept_distances(case.keeps, case.longest)
        block = case.config.block_m, case.config.block_n
        reader = case.template.reader(self.p, case.config, TARGET)
        self.plan = document_plan(self.p, block, case.longest, keeps, device.gpu_of(TARGET), reader)
        self.steps = {name: emulated(step.function, folder, name) for name, step in self.plan.steps.items()}
        self.limits = reader.limits(self.p, -(-case.row // block[0]), 1, device.gpu_of(TARGET))
        self.known = {name: aligned(x) for name, x in self.plan.constants.items()}
        for step in self.plan.steps.values():
            for output, (shape, dtype) in step.outputs.items():
                self.known[output] = aligned(np.full(shape, POISON, dtype))
        self.known["keep_bits"][-1] = 0

    def run(self, bounds):
        known = self.known
        known["bounds"] = bounds
        rows, blocks = known["states"].shape
        launches = {
            "keep_words": (-(-rows * blocks // keep_words.WARPS), 32 * keep_words.WARPS),
            "listing": (-(-len(known["counts"]) // listing.WARPS), 32 * listing.WARPS),
            "order": (grid_size(self.limits), ORDER_THREADS),
        }
        sizes = {"n_tokens": len(bounds), "n_rows": rows, "n_blocks": blocks, "n_counts": len(known["counts"])}
        sizes |= {"n_entries": len(known["entries"]), "cse_v1": rows * blocks}
        sizes |= {"n_distances": len(known.get("distances", ()))}
        for name, step in self.plan.steps.items():
            ctas, threads = launches[name]
            self.steps[name]({x: known[x] for x in (*step.inputs, *step.outputs)}, sizes, range(ctas), threads, 0)


def expected(case, lengths):
    """The mask of the row, in the kernel's blocks."""
    row, keeps = case.row, kept_distances(case.keeps, case.longest)
    number = np.arange(row) + len(lengths)
    number[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    keep = number[:, None] == number
    if keeps is not None:
        distance = np.arange(row) - np.arange(row)[:, None]
        keep &= keeps[np.clip(distance + case.longest - 1, 0, len(keeps) - 1)]
    return BlockSparseMask.from_dense(keep, (case.config.block_m, case.config.block_n))


@pytest.mark.parametrize("name", CASES)
def test_lists_are_those_of_the_mask(name, tokens_kernel, tmp_path):
    case = CASES[name]
    planned, block_m, block_n = Planned(case, tmp_path), case.config.block_m, case.config.block_n
    never_empty, rows = case.template is specialized, -(-case.row // case.config.block_m)
    for lengths in LENGTHS:
        layout = layout_of_lengths(lengths, len(lengths), max(lengths))
        planned.run(run_tokens(tokens_kernel, layout, case.row, 1)["bounds"])
        mask, known = expected(case, lengths), planned.known
        words = lane_keep_bits(mask.bitmap, block_m, block_n)
        blocks = known["states"].shape[1]
        assert known["places"][-1, 0] + 4 == len(known["entries"])
        for number, (count, partial) in enumerate(known["counts"]):
            row = number % rows
            begin = number * blocks
            listed = known["entries"][begin : begin + count]
            part = slice(mask.part_row_ptr[row], mask.part_row_ptr[row + 1])
            full = mask.full_col_idx[mask.full_row_ptr[row] : mask.full_row_ptr[row + 1]]
            if never_empty and part.start == part.stop and not len(full):
                assert (count, partial) == (1, 1)
                assert listed.tolist() == [[0, len(known["keep_bits"]) - 1]]
                continue
            columns = mask.part_col_idx[part]
            assert (count, partial) == (len(columns) + len(full), len(columns))
            assert listed[:, 0].tolist() == [*(columns * block_n), *(full * block_n)]
            assert (listed[partial:, 1] == -1).all()
            np.testing.assert_array_equal(known["keep_bits"][listed[:partial, 1]], words[part])
            after = known["entries"][begin + count : min(begin + count + 4, begin + blocks)]
            assert (after == [0, -1]).all()
        assert not known["keep_bits"][-1].any()
        check_items(case, known, rows, blocks)


def check_items(case, known, rows, blocks):
    item = __import__(case.template.__name__.rpartition(".")[0] + ".work", fromlist=["Item"]).Item
    number = known["items"][-1, 0]
    assert (known["items"][number:, item.SPLITS] == 0).all()
    items = known["items"][:number]
    row = items[:, item.HEAD] * rows + items[:, item.FIRST_ROW] // case.config.block_m
    assert (np.bincount(row, minlength=len(known["counts"])) >= 1).all()
    lengths = np.bincount(row, items[:, item.END] - items[:, item.BEGIN], len(known["counts"]))
    np.testing.assert_array_equal(lengths, known["counts"][:, 0])
    whole = items[:, item.SPLITS] == 1
    np.testing.assert_array_equal(items[whole, item.BEGIN], row[whole] * blocks)


def test_lists_that_are_too_long_are_refused():
    case = CASES["specialized"]
    given = problem(1 << 20)
    reader = case.template.reader(given, case.config, TARGET)
    with pytest.raises(UnsupportedError, match="32-bit"):
        document_plan(given, (64, 64), 1 << 20, None, device.gpu_of(TARGET), reader)
