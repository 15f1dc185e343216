"""The plan of rows, run on the CPU: what its lanes see is the dense mask's rows, and the kernel computes with it."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm

from relax_passes.schedule.cuda import ScheduleForCUDA
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.attention.row_wise.test_kernel import SM_80, bits_of, decode, needs_gxx, problem
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseConfig, RowWiseGeometry
from tir_kernels.attention.row_wise.plan import row_plan
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.cuda.device import H200
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask


def by_position(*sizes, **rest):
    return replace(problem(*sizes, **rest), has_positions=True)


def distances(length):
    return np.arange(length)[:, None] - np.arange(length)


MASKS = {
    "causal": lambda n: distances(n) >= 0,
    "window": lambda n: (distances(n) >= 0) & (distances(n) < 20),
    "sink and window": lambda n: (distances(n) >= 0) & ((distances(n) < 50) | (np.arange(n) < 4)),
    "strided": lambda n: (distances(n) >= 0) & (distances(n) % 7 == 0),
    "documents": lambda n: (distances(n) >= 0) & (np.arange(n)[:, None] // 90 == np.arange(n) // 90),
    "random": lambda n: np.random.default_rng(1).random((n, n)) < 0.3,
    "all": lambda n: np.ones((n, n), bool),
    "empty rows": lambda n: (distances(n) >= 0) & (np.arange(n)[:, None] % 3 > 0),
    "per head": lambda n: np.stack([MASKS[x](n) for x in ("causal", "window", "random", "strided")]),
    "per batch": lambda n: np.stack([MASKS["window"](n)[None], MASKS["random"](n)[None]]),
}


@functools.lru_cache(maxsize=64)
def compiled(text: str):
    return tvm.compile(tvm.ir.load_json(text), target="llvm")["main"]


def planned(given, mask: BlockSparseMask, positions) -> list[np.ndarray]:
    """The kernel's operands for some positions; the steps run on the CPU as they are scheduled by default."""
    plan = row_plan(given, mask, H200)
    known = {name: tvm.runtime.tensor(x) for name, x in plan.constants.items()}
    known["positions"] = tvm.runtime.tensor(np.asarray(positions, np.int64))
    for name, step in plan.steps.items():
        ((shape, dtype),) = step.outputs.values()
        known[name] = tvm.runtime.tensor(np.full(shape, 77, dtype))
        mod = tvm.IRModule({"main": step.function.with_attr("global_symbol", "main")})
        compiled(tvm.ir.save_json(mod))(*(known[x] for x in step.inputs), known[name])
    return [*(known[name].numpy() for name in plan.operands), *plan.rest.arrays]


def stored(keep, block=(16, 64)) -> BlockSparseMask:
    return BlockSparseMask.from_dense(keep, block)


ONE_ROW = by_position(1, 203, heads=4, kv_heads=2, batch=2)


@pytest.mark.parametrize("mask", MASKS)
def test_lanes_see_the_row_of_the_position(mask):
    keep = MASKS[mask](203)
    for position in (0, 15, 16, 63, 64, 130, 202, -1, -203):
        seen = decode(planned(ONE_ROW, stored(keep), [position]), ONE_ROW)
        np.testing.assert_array_equal(seen, np.broadcast_to(keep[..., [position], :], seen.shape), str(position))


@pytest.mark.parametrize(
    "given, positions",
    [
        (by_position(3, 203, heads=2), [5, 6, 7]),  # one block row
        (by_position(3, 203, heads=2), [15, 16, 17]),  # two
        (by_position(4, 203, heads=4, kv_heads=2), [202, 0, 100, 100]),
        (by_position(7, 203, heads=4, kv_heads=1), [3, 190, 4, 77, 78, 5, -1]),  # two row tiles
        (by_position(16, 203, heads=4, kv_heads=4), [*range(100, 116)]),
    ],
)
def test_several_queries(given, positions):
    keep = MASKS["random" if given.q_heads == 2 else "per head"](203)
    for block in ((16, 64), (64, 64)):
        seen = decode(planned(given, stored(keep, block), positions), given)
        np.testing.assert_array_equal(seen, np.broadcast_to(keep[..., positions, :], seen.shape), str(block))


@pytest.mark.parametrize("length", [40, 203, 256])
def test_positions_outside_see_the_nearest_key_alone(length):
    """Also where the mask lists no block with it."""
    given = by_position(5, length, heads=2)
    keep = MASKS["window"](length)
    keep[:, :20] = keep[-20:] = False
    positions = [length, -length - 1, 30, 2**40, -(2**40)]
    seen = decode(planned(given, stored(keep), positions), given)
    first, last = np.arange(length) == 0, np.arange(length) == length - 1
    expected = np.stack([last, first, keep[30], last, first])
    np.testing.assert_array_equal(seen, np.broadcast_to(expected, seen.shape))


def test_shares_of_a_long_list():
    """Every CTA has an equal part, which is empty where the row has few blocks; equal lists are stored once."""
    given = by_position(1, 8192, dim=128, heads=8, kv_heads=4)
    mask = BlockSparseMask.keep_all(8192, 8192, (16, 64))
    whole, columns, *_ = planned(given, mask, [100])
    per_unit = [whole[whole[:, 0] == unit] for unit in range(4)]
    for work in per_unit:
        assert len(work) == work[0, 6] > 8
        assert work[0, 1] == 0 and work[-1, 2] == 512 == len(columns)
        np.testing.assert_array_equal(work[1:, 1], work[:-1, 2])
    window = BlockSparseMask.from_dense(np.eye(2048, dtype=bool) | (np.arange(2048)[:, None] == 2047), (16, 64))
    given = by_position(1, 2048, dim=128, heads=1)
    work, *_ = planned(given, window, [100])
    assert len(work) > 1 and (work[:, 2] - work[:, 1]).tolist().count(0) >= len(work) - 4
    assert (work[:, 2] - work[:, 1]).sum() == 4


def test_constants_do_not_depend_on_positions():
    """They are as large as the block lists; tiles have room for what the longest block row lists."""
    plan = row_plan(ONE_ROW, stored(MASKS["window"](203)), H200)
    assert plan.steps["columns"].outputs["columns"] == ((2 * 4, 16), "int32")
    assert plan.steps["keep_bits"].outputs["keep_bits"] == ((2 * 4, 1, 32, 1), "uint32")
    assert list(plan.steps) == ["spans", "entries", "columns", "keep_bits", "work"]


EMULATED = {
    "window": (by_position(1, 203, dim=32, heads=4, kv_heads=2), RowWiseConfig(4, 3), "sink and window", [150]),
    "first": (by_position(1, 203, dim=32, heads=4, kv_heads=2), RowWiseConfig(2, 2), "causal", [0]),
    "several, split, per head": (
        by_position(5, 203, heads=4, kv_heads=2, dtype="bfloat16"),
        RowWiseConfig(4, 2),
        "per head",
        [0, 202, 17, 18, 19],
    ),
    "split, empty shares": (by_position(1, 1400, dim=256, heads=1), RowWiseConfig(2, 2), "causal", [20]),
    "split": (by_position(1, 1400, dim=256, heads=1), RowWiseConfig(2, 2), "causal", [1399]),
    "empty rows": (by_position(3, 203, dim=16, heads=2), RowWiseConfig(8, 2), "empty rows", [0, 1, 3]),
    "outside": (by_position(3, 203, dim=16, heads=2), RowWiseConfig(4, 2), "window", [203, 100, -204]),
}


@needs_gxx
@pytest.mark.parametrize("name", EMULATED)
def test_generated_cuda_computes_with_a_plan(name, tmp_path):
    given, config, mask, positions = EMULATED[name]
    rng, keep = np.random.default_rng(0), MASKS[mask](given.kv_len)
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    rows = [n for n, position in enumerate(positions) if -given.kv_len <= position < given.kv_len]
    kept = np.zeros((*keep.shape[:-2], len(positions), given.kv_len), bool)
    kept[..., rows, :] = keep[..., [positions[n] for n in rows], :]
    expected = attention_reference(given, *(x.float().numpy() for x in (q, k, v)), kept)
    for position in positions:  # as the scatter that writes the cache does
        if not -given.kv_len <= position < given.kv_len:
            nearest = given.kv_len - 1 if position > 0 else 0
            k[:, :, nearest] = v[:, :, nearest] = float("nan")
    operands = [aligned(x) for x in planned(given, stored(keep), positions)]
    arrays = dict(zip(("work", "columns", "keep_bits", "partials", "arrivals"), operands))
    arrays |= {"q": bits_of(q), "k": bits_of(k), "v": bits_of(v)}
    arrays["out"] = out = aligned(np.full(given.shape("out"), 0x7FFF, np.int16))
    g = RowWiseGeometry(given, config)
    n_work = len(arrays["work"])
    assert ("split" in name) == (n_work > g.n_units)
    kernel = EmulatedKernel(source(row_wise_cuda, given, config), tmp_path)
    kernel(arrays, {"n_work": n_work}, rng.permutation(n_work), g.threads, g.shared_bytes)
    assert not arrays["arrivals"].any()
    found = torch.from_numpy(out.copy()).view(dtype).double().numpy()
    outside = [n for n in range(len(positions)) if n not in rows]
    assert np.isnan(found[:, :, outside]).all()
    if outside:  # the others' weights of 0 multiply its NaNs, as in PyTorch
        return
    np.testing.assert_allclose(found[:, :, rows], expected[:, :, rows], atol=2 * torch.finfo(dtype).eps, rtol=0)


def test_the_kernel_is_that_of_known_rows():
    """Its source is the same, so it is the one that was verified on a GPU."""
    assert source(row_wise_cuda, ONE_ROW, RowWiseConfig(4, 3)) == source(
        row_wise_cuda, replace(ONE_ROW, has_positions=False), RowWiseConfig(4, 3)
    )
    with pytest.raises(UnsupportedError, match="plan"):
        row_wise_cuda.operands(ONE_ROW, RowWiseConfig(4, 3), SM_80)


@pytest.mark.slow
def test_steps_are_scheduled_for_gpus():
    target = SM_80
    given = by_position(4, 300, heads=4, kv_heads=2)
    plan = row_wise_cuda.plan(given, RowWiseConfig(4, 3), target, stored(MASKS["causal"](300)))
    functions = {name: step.function.with_attr("global_symbol", name) for name, step in plan.steps.items()}
    mod = ScheduleForCUDA(target)(tvm.IRModule(functions))
    with target:
        text = cuda_source(tvm.compile(mod, target=target))
    assert {name.partition("_")[0] for name in re.findall(r"(\w+)_kernel\(", text)} == {
        "spans",
        "entries",
        "columns",
        "keep",
        "work",
    }
    assert len(set(re.findall(r"\w+_kernel\(", text))) == 5
