"""Block maps on GPUs: lists and items against NumPy, and what attention kernels make of them; CUDA run on the CPU."""

import math
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.block_maps.emulated import TARGET, emulated
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned, tensor_map
from tir_kernels.attention.block_maps.compaction import WARPS
from tir_kernels.attention.block_maps.order import THREADS
from tir_kernels.attention.block_wise import kernel as block_wise
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.block_wise.geometry import Geometry as BlockWiseGeometry
from tir_kernels.attention.problem import AttentionProblem, BlockMap, Layouts
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.attention.warp_specialized.producer import tensor_map_fields
from tir_kernels.cuda import device
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
ITEMS = {specialized: ("items", "entries", "keep_bits", "partials", "arrivals", "taken")}
ITEMS[block_wise] = "work", "entries", "keep_bits", "partials", "arrivals"
POISON = 0x7FFFFFFF


def problem(q_len, kv_len, block_map, dim=16, batch=1, heads=2, kv_heads=1, dtype="float16", **rest):
    rest = {"scale": dim**-0.5, "gives_lse": True, **rest}
    return AttentionProblem(batch, heads, kv_heads, q_len, kv_len, dim, dim, dtype, block_map=block_map, **rest)


@dataclass(frozen=True)
class Case:
    template: object
    problem: AttentionProblem
    config: object
    mask: str = "random"
    shares: tuple = (0.4,)  # of the map that are kept, one after another


def specialized_config(m, n, stages=2, together=1):
    return WarpSpecializedConfig(m, n, stages, together)


CASES = {
    "specialized": Case(specialized, problem(200, 330, BlockMap(1, 2, 64, 64)), specialized_config(64, 64)),
    "specialized, smaller blocks than the map's, causal, bfloat16": Case(
        specialized,
        problem(300, 300, BlockMap(2, 1, 128, 128), batch=2, dtype="bfloat16"),
        specialized_config(64, 64),
        "causal",
        (0.5, 0.0, 1.0),
    ),
    "specialized, whole blocks of 128": Case(
        specialized, problem(256, 384, BlockMap(1, 2, 128, 128)), specialized_config(128, 128), "full", (0.4, 0.1)
    ),
    "specialized, split rows": Case(
        specialized,
        problem(64, 1500, BlockMap(1, 1, 64, 64), sink_dtype="float32"),
        specialized_config(64, 64),
        "full",
        (1.0, 0.5, 0.1),
    ),
    "specialized, two blocks of 64 together": Case(
        specialized, problem(200, 330, BlockMap(1, 2, 64, 64)), specialized_config(64, 64, 2, 2), shares=(0.4, 0.0, 1.0)
    ),
    "specialized, four blocks of 32 together, causal, bfloat16": Case(
        specialized,
        problem(300, 300, BlockMap(2, 1, 128, 64), batch=2, dtype="bfloat16"),
        specialized_config(64, 32, 2, 4),
        "causal",
        (0.5, 0.0, 1.0),
    ),
    "specialized, two blocks of 32 together, many": Case(
        specialized, problem(70, 1500, BlockMap(1, 1, 128, 32)), specialized_config(128, 32, 2, 2), "full", (0.3,)
    ),
    "specialized, four blocks together, split rows": Case(
        specialized,
        problem(64, 2500, BlockMap(1, 1, 64, 32), heads=1),
        specialized_config(64, 32, 2, 4),
        "full",
        (1.0, 0.5, 0.1),
    ),
    "block-wise": Case(
        block_wise, problem(200, 330, BlockMap(1, 2, 64, 64)), BlockWiseConfig(64, 64, 4, 2), shares=(0.4, 0.05, 1.0)
    ),
    "block-wise, blocks of three, small": Case(
        block_wise,
        problem(70, 200, BlockMap(1, 1, 48, 96), layouts=Layouts(*["bshd"] * 4)),
        BlockWiseConfig(16, 32, 1, 2),
        "causal",
        (0.5, 0.0),
    ),
    "block-wise, split rows": Case(
        block_wise, problem(64, 1500, BlockMap(1, 2, 64, 64)), BlockWiseConfig(64, 64, 4, 3), "per head", (1.0, 0.3)
    ),
    "block-wise, float32": Case(
        block_wise, problem(140, 200, BlockMap(1, 2, 64, 64), dtype="float32"), BlockWiseConfig(64, 32, 4, 2)
    ),
}


def dense(name, p, rng):
    shape = p.q_len, p.kv_len
    if name == "full":
        return np.ones(shape, bool)
    if name == "causal":
        return np.tril(np.ones(shape, bool), p.kv_len - p.q_len)
    if name == "per head":
        return np.stack([np.ones(shape, bool), np.tril(np.ones(shape, bool), 900)])
    keep = rng.random(shape) < 0.4
    keep[:, :64] = keep[:, 128:288] = True  # full blocks with a gap between them
    keep[3:9] = False
    return keep


class Planned:
    """A case's plan, run on the CPU; `run(block_map)` gives the arrays that the attention kernel reads, by name."""

    def __init__(self, case, folder, rng):
        self.case, self.p = case, case.problem
        self.keep = dense(case.mask, self.p, rng)
        self.mask = BlockSparseMask.from_dense(self.keep, (case.config.block_m, case.config.block_n))
        self.plan = case.template.plan(self.p, case.config, TARGET, self.mask)
        self.steps = {name: emulated(step.function, folder, name) for name, step in self.plan.steps.items()}
        self.rest = [aligned(x) for x in self.plan.rest.arrays]

    def run(self, block_map):
        known = {name: aligned(x) for name, x in self.plan.constants.items()}
        known["block_map"] = aligned(block_map)
        launches = {"compaction": (-(-(len(known["places"]) - 1) // WARPS), 32 * WARPS), "order": (1, THREADS)}
        for name, step in self.plan.steps.items():
            for output, (shape, dtype) in step.outputs.items():
                known[output] = aligned(np.full(shape, POISON, dtype))
            arrays = {x: known[x] for x in (*step.inputs, *step.outputs)}
            sizes = {"n_rows": len(known["counts"]), "n_items": len(known.get("items", ()))}
            ctas, threads = launches[name]
            self.steps[name](arrays, sizes, range(ctas), threads, 0)
        self.known = known
        operands = [known[x] for x in self.plan.operands] + self.rest
        return dict(zip(ITEMS[self.case.template], operands, strict=True))


def spread(p, block_map):
    rows, columns = np.arange(p.q_len) // p.block_map.block_m, np.arange(p.kv_len) // p.block_map.block_n
    return block_map[:, :, rows][..., columns]


def few_multiprocessors(monkeypatch, number=1):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=number)])


@pytest.mark.parametrize("name", CASES)
def test_lists_and_items(name, monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch)
    case, rng = CASES[name], np.random.default_rng(0)
    planned, p, config = Planned(case, tmp_path, rng), case.problem, case.config
    never_empty = case.template is specialized
    rows = -(-p.q_len // config.block_m)
    in_runs = case.mask in ("full", "causal", "per head")
    assert (len(planned.plan.constants["full_columns"]) == 1) == in_runs  # what nobody reads takes no memory
    for share in case.shares:
        block_map = rng.random(p.block_map.shape(p.q_len, p.kv_len)) < share
        planned.run(block_map)
        both = np.broadcast_to(spread(p, block_map), (p.batch, p.q_heads, p.q_len, p.kv_len))
        expected = BlockSparseMask.from_dense(both & planned.keep, (config.block_m, config.block_n))
        of = expected.head_map(p.batch, p.q_heads).reshape(-1)
        counts, entries, places = (planned.known[x] for x in ("counts", "entries", "places"))
        assert len(counts) == p.batch * p.q_heads * rows
        for number, (count, partial) in enumerate(counts):
            head, row = divmod(number, rows)
            at = of[head] * rows + row
            together = getattr(config, "together", 1)
            assert places[number, 0] + count <= places[number + 1, 0]
            listed = entries[places[number, 0] * together : (places[number, 0] + count) * together]
            part = expected.part_col_idx[expected.part_row_ptr[at] : expected.part_row_ptr[at + 1]]
            full = expected.full_col_idx[expected.full_row_ptr[at] : expected.full_row_ptr[at + 1]]
            if together > 1:
                check_tiles(listed, partial, part, full, planned.mask, together)
                continue
            if never_empty and not len(part) + len(full):
                assert (count, partial) == (1, 1) and listed.tolist() == [[0, len(planned.mask.bitmap)]]
                continue
            assert (count, partial) == (len(part) + len(full), len(part))
            assert listed[:, 0].tolist() == [*(part * config.block_n), *(full * config.block_n)]
            assert (listed[partial:, 1] == -1).all() and (listed[:partial, 1] >= 0).all()
            columns = planned.mask.part_col_idx[listed[:partial, 1]]
            assert columns.tolist() == part.tolist()
        check_items(case, planned, rows)


def check_tiles(listed, partial, part, full, mask, together):
    """A row's tiles: blocks behind all keys, partial blocks, full ones; tiles without partial ones have none listed."""
    count, kept = len(part) + len(full), len(mask.bitmap)
    added = max(-(-count // together), 1) * together - count
    assert len(listed) == added + count and partial == -(-(added + len(part)) // together)
    behind = mask.n_block_cols * mask.block_n
    assert listed[:, 0].tolist() == [behind] * added + [*(part * mask.block_n), *(full * mask.block_n)]
    assert (listed[:added, 1] == kept).all()
    assert mask.part_col_idx[listed[added : added + len(part), 1]].tolist() == part.tolist()
    beside = listed[added + len(part) : partial * together, 1]
    assert (beside == kept + 1).all() and (listed[partial * together :, 1] == -1).all()


def check_items(case, planned, rows):
    item = __import__(case.template.__name__.rpartition(".")[0] + ".work", fromlist=["Item"]).Item
    items, counts, places = (planned.known[x] for x in ("items", "counts", "places"))
    number = items[-1, 0]
    assert (items[number:, item.SPLITS] == 0).all()
    items = items[:number]
    assert (items != POISON).all()
    row = items[:, item.HEAD] * rows + items[:, item.FIRST_ROW] // case.config.block_m
    lengths = items[:, item.END] - items[:, item.BEGIN]
    np.testing.assert_array_equal(np.bincount(row, lengths, len(counts)), counts[:, 0])
    slots = []
    for i in range(len(counts)):
        parts = items[row == i]
        parts = parts[np.argsort(parts[:, item.BEGIN], kind="stable")]
        assert len(parts) >= 1 and (parts[:, item.SPLITS] == len(parts)).all()
        assert (parts[1:, item.BEGIN] == parts[:-1, item.END]).all() and parts[0, item.BEGIN] == places[i, 0]
        if len(parts) > 1:
            first = parts[0, item.FIRST_SLOT]
            assert (parts[:, item.FIRST_SLOT] == first).all()
            slots += range(first, first + len(parts))
            assert (parts[:, item.END] > parts[:, item.BEGIN]).all()
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= len(planned.rest[1])
    assert (len(slots) > 0) == ("split" in name_of(case) and counts[:, 0].max() > 5)


def name_of(case):
    return next(name for name, other in CASES.items() if other is case)


@pytest.mark.parametrize("name", CASES)
def test_attention(name, monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch)
    case, rng = CASES[name], np.random.default_rng(1)
    planned, p = Planned(case, tmp_path, rng), case.problem
    dtype = getattr(torch, p.dtype)
    tensors = {x: torch.from_numpy(rng.standard_normal(p.shape(x), np.float32)).to(dtype) for x in "qkv"}
    given = [tensors[x].float().numpy() for x in "qkv"]
    arrays = {x: aligned((t if p.dtype == "float32" else t.view(torch.int16)).numpy()) for x, t in tensors.items()}
    sink = None
    if p.sink_dtype:
        sink = np.array([1.5, -math.inf], np.float32)
        arrays["sink"] = aligned(sink)
    if case.template is specialized:
        geometry = Geometry(p, case.config)
        threads, ctas = geometry.cta_threads, geometry.grid_size(device.gpu_of(TARGET))
        tiles = {"q": geometry.q_tile, "k": geometry.k_tile, "v": geometry.v_tile}
        for x, tile in tiles.items():
            (fields,) = tensor_map_fields(p, x, tile, None if x == "q" else case.config.block_n)
            arrays[f"{x}_map"] = tensor_map(arrays[x], 0, fields)
    else:
        geometry = BlockWiseGeometry(p, case.config)
        threads, ctas = geometry.threads, None
    kernel = EmulatedKernel(source.__wrapped__(case.template, p, case.config, "sm_90a"), tmp_path)
    for share in case.shares:
        block_map = rng.random(p.block_map.shape(p.q_len, p.kv_len)) < share
        read = planned.run(block_map)
        read["partials"][...] = np.nan
        names = ITEMS[case.template]
        out = aligned(np.full(p.shape("out"), *((np.nan, np.float32) if p.dtype == "float32" else (0x7FFF, np.int16))))
        lse = aligned(np.full(p.lse_shape, np.nan, np.float32))
        items = read[names[0]]
        sizes = {"n_items": len(items), "n_work": len(items), "cse_v1": 8 * len(items)}
        order = rng.permutation(ctas or len(items))
        kernel({**arrays, **read, "out": out, "lse": lse}, sizes, order, threads, geometry.shared_bytes)
        assert not any(read[x].any() for x in names[4:]), "the next launch must find what this found"
        got = torch.from_numpy(out).view(dtype).double().numpy()
        expected, expected_lse = attention_reference(p, *given, spread(p, block_map) & planned.keep, None, sink)
        eps = torch.finfo(dtype).eps if p.dtype != "float32" else 1e-6
        np.testing.assert_allclose(got, expected, atol=4 * eps, rtol=0)
        np.testing.assert_allclose(lse, expected_lse, atol=2 * max(eps, 1e-5), rtol=1e-5)


def test_what_has_no_kernel_says_why():
    reason = specialized.unsupported(problem(64, 64, BlockMap(1, 1, 48, 64)), TARGET)
    assert "64x32" in reason and "48" in reason
    assert block_wise.unsupported(problem(64, 64, BlockMap(1, 1, 48, 64)), TARGET) is None
    from tir_kernels.attention.block_maps.places import places_of

    long = problem(2**22, 2**22, BlockMap(1, 1, 64, 64), heads=1)
    mask = BlockSparseMask.from_dense(np.ones((64, 64), bool), (64, 64))
    with pytest.raises(UnsupportedError, match="32-bit"):
        places_of(mask, long)


@pytest.mark.parametrize("template", [specialized, block_wise])
def test_operands_are_the_lists_of_the_mask_and_the_number_of_items(template):
    given = problem(200, 330, BlockMap(1, 1, 1920, 1920))
    config = template.configs(given, TARGET)[0]
    mask = BlockSparseMask.from_dense(dense("causal", given, None), (config.block_m, config.block_n))
    items, *rest = template.operands(given, config, TARGET, mask).arrays
    fixed_items, *fixed = template.operands(replace(given, block_map=None), config, TARGET, mask).arrays
    np.testing.assert_array_equal(items, [*fixed_items, [len(fixed_items), *[0] * 7]])
    for x, y in zip(rest, fixed, strict=True):
        np.testing.assert_array_equal(x, y)
