"""What the warp-specialized kernel computes: its generated CUDA run on the CPU against NumPy in float64."""

import re
import shutil
from dataclasses import dataclass, replace
from itertools import islice, permutations

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned, tensor_map
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.warp_specialized import geometry
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.attention.warp_specialized.producer import tensor_map_fields
from tir_kernels.attention.warp_specialized.work import Item
from tir_kernels.cuda import device
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
TARGET = parse_target("cuda -arch=sm_90a")
OPERANDS = ("items", "entries", "keep_bits", "partials", "arrivals", "taken")
BSHD = Layouts(*["bshd"] * 4)


def problem(q_len, kv_len=None, dim=64, v_dim=None, batch=1, heads=1, kv_heads=None, dtype="float16", **rest):
    rest = {"scale": dim**-0.5, "gives_lse": True, **rest}
    return AttentionProblem(batch, heads, kv_heads or heads, q_len, kv_len or q_len, dim, v_dim or dim, dtype, **rest)


def config(block_m, block_n, stages=2, together=1, apart=1):
    return WarpSpecializedConfig(block_m, block_n, stages, together, apart)


@dataclass(frozen=True)
class Case:
    problem: AttentionProblem
    config: WarpSpecializedConfig
    mask: str = "random"
    split: bool = False  # whether block rows are split


def packed(batch, length, heads, kv_heads, dim):
    """Views of q, k and v in one projection: (batch, length, heads + 2 * kv_heads, dim)."""
    token = (heads + 2 * kv_heads) * dim
    offsets = (0, heads * dim, (heads + kv_heads) * dim)
    return Layouts(*(View(batch * length * token, offset, length * token, dim, token) for offset in offsets), "bshd")


REPEATED = Layouts(View(2 * 65 * 64, 0, 0, 64, 128), View(100 * 64, 0, 0, 0, 64), View(2 * 100 * 64, 0, 6400, 0, 64))
CASES = {
    "causal": Case(problem(200, heads=3), config(64, 64), "causal"),
    "one item": Case(problem(40, 50), config(64, 64, 3), "full"),
    "two warpgroups": Case(problem(150, 300, heads=2, dtype="bfloat16"), config(128, 64)),
    "three warpgroups, three stages": Case(problem(300, 200, dim=16), config(192, 64, 3)),
    "blocks of 128": Case(problem(130, 300, dim=32), config(64, 128), "empty rows"),
    "heads of 128": Case(problem(100, 200, dim=128), config(64, 64), "causal"),
    "heads of 96 and 80": Case(problem(70, 150, dim=96, v_dim=80, dtype="bfloat16"), config(64, 64)),
    "heads of 72 and 88, grouped": Case(
        problem(70, 150, dim=72, v_dim=88, batch=2, heads=2, kv_heads=1), config(64, 64)
    ),
    "heads of 8": Case(problem(70, 150, dim=8, heads=2), config(64, 64), "causal"),
    "heads of 128 and 80, two warpgroups": Case(problem(130, 200, dim=128, v_dim=80), config(128, 64), "causal"),
    "one stage of queries": Case(problem(140, 70, dim=256, heads=2, gives_lse=False), config(128, 64)),
    "split rows": Case(problem(130, 900, heads=2, dim=32), config(128, 64), "empty rows", split=True),
    "split rows, continued, sink": Case(
        problem(70, 900, dim=16, heads=2, continues=True, sink_dtype="bfloat16"), config(64, 64), split=True
    ),
    "continued": Case(problem(130, 150, heads=2, kv_heads=1, continues=True, layouts=BSHD), config(128, 64)),
    "layouts, shared heads, batch": Case(
        problem(90, 100, dim=16, batch=2, heads=4, kv_heads=2, layouts=Layouts("sbhd", "hbsd", "shbd", "bshd")),
        config(64, 64),
        "diagonal",
    ),
    "packed": Case(
        problem(90, dim=32, batch=2, heads=4, kv_heads=2, layouts=packed(2, 90, 4, 2, 32)), config(64, 64), "causal"
    ),
    "repeated": Case(problem(65, 100, batch=2, heads=2, layouts=REPEATED), config(64, 64)),
    "bias": Case(problem(70, 90, dim=16, heads=2, batch=2, bias_shape=(1, 2, 70, 90)), config(128, 64)),
    "bias of rows, negative scale": Case(
        problem(70, 90, dim=16, heads=2, bias_shape=(1, 1, 70, 1), bias_dtype="bfloat16", scale=-0.3), config(64, 64)
    ),
    "key counts": Case(problem(130, 300, dim=32, batch=3, heads=2, key_counts=3), config(128, 64), "full"),
    "key counts, bias, sink, split rows": Case(
        problem(70, 900, dim=16, heads=2, key_counts=1, bias_shape=(1, 1, 70, 1), sink_dtype="float32"),
        config(64, 64, 3),
        split=True,
    ),
    "four blocks of 32 together": Case(problem(150, 300, dim=32, heads=2, kv_heads=1), config(64, 32, 2, 4)),
    "two blocks of 64 together, bfloat16": Case(
        problem(300, 520, dim=128, dtype="bfloat16"), config(128, 64, 2, 2), "empty rows"
    ),
    "two blocks of 32 together, causal, heads of 16": Case(
        problem(200, dim=16, heads=2), config(64, 32, 3, 2), "causal"
    ),
    "three blocks of 64 together": Case(problem(70, 500, dim=64), config(64, 64, 2, 3), "diagonal"),
    "four blocks together, split rows, continued, sink": Case(
        problem(70, 1300, dim=16, continues=True, sink_dtype="float32"), config(64, 32, 2, 4), split=True
    ),
    "sink": Case(problem(130, 140, dim=48, heads=3, sink_dtype="float32"), config(64, 64), "empty rows"),
    # Three warpgroups, of which one or two begin before the first token.
    "one before, causal": Case(problem(310, dim=16, heads=2), config(192, 128), "causal"),
    "two before, causal": Case(problem(250, dim=32, heads=2), config(192, 128), "causal"),
    "two before, window, packed": Case(
        problem(200, dim=16, batch=2, heads=2, kv_heads=1, layouts=packed(2, 200, 2, 1, 16)), config(192, 128), "window"
    ),
    "one before, blocks, grouped, bfloat16": Case(
        problem(257, 400, heads=2, kv_heads=1, dtype="bfloat16"), config(192, 64), "blocks"
    ),
    "two before, one token": Case(problem(1, 200, dim=16, heads=3, batch=2, layouts=BSHD), config(192, 128), "full"),
    "two before, bias": Case(problem(60, 90, dim=16, heads=2, bias_shape=(1, 2, 60, 90)), config(192, 64)),
    "one before, bias of rows, softcap": Case(
        problem(70, 90, dim=16, heads=2, batch=2, bias_shape=(2, 1, 70, 1), softcap=2.0), config(192, 64)
    ),
    "two before, continued, sink": Case(
        problem(250, 150, dim=16, heads=2, continues=True, sink_dtype="float32", layouts=BSHD), config(192, 128)
    ),
    "one before, split rows, continued, sink": Case(
        problem(100, 1900, dim=16, continues=True, sink_dtype="bfloat16"), config(192, 64), split=True
    ),
    # Blocks of tokens that are apart, in classes of equal and of different sizes.
    "two apart": Case(problem(256, 384, dim=16, heads=2), config(64, 64, apart=2)),
    "two apart, one class longer, bfloat16": Case(
        problem(257, 391, dtype="bfloat16", heads=2, kv_heads=1), config(128, 64, apart=2), "dilated"
    ),
    "seven apart, classes of different sizes": Case(problem(300, 437, dim=32, heads=2), config(64, 64, 3, apart=7)),
    "seven apart, continued, sink": Case(
        problem(500, 620, dim=128, continues=True, sink_dtype="bfloat16", layouts=BSHD), config(64, 64, apart=7), "far"
    ),
    "two apart, split rows": Case(problem(70, 1900, dim=16), config(64, 64, apart=2), split=True),
    "five apart, packed": Case(
        problem(333, dim=16, batch=2, heads=2, kv_heads=1, layouts=packed(2, 333, 2, 1, 16)),
        config(192, 64, apart=5),
        "far",
    ),
    "four blocks of 32 apart together": Case(problem(150, 700, dim=16), config(64, 32, 2, 4, apart=3), "empty rows"),
    "farther apart than there are queries": Case(problem(5, 300, dim=16, heads=2), config(64, 64, apart=7)),
    "farther apart than there are tokens": Case(problem(5, 3, dim=16, heads=2), config(64, 64, apart=7), "full"),
    "apart, bias, softcap": Case(
        problem(150, 301, dim=16, heads=2, bias_shape=(1, 2, 150, 301), softcap=2.0), config(64, 64, apart=2)
    ),
    "apart, key counts": Case(problem(150, 301, dim=16, batch=2, key_counts=2), config(64, 64, apart=4), "full"),
    "two before, key counts, split rows": Case(
        problem(60, 1900, dim=16, key_counts=1), config(192, 128), "full", split=True
    ),
}


def dense(name: str, given: AttentionProblem, rng) -> np.ndarray:
    """Boolean (q_len, kv_len)."""
    shape = given.q_len, given.kv_len
    keep = rng.random(shape) < 0.4
    if name in ("causal", "full"):
        keep = np.tril(np.ones(shape, bool)) if name == "causal" else np.ones(shape, bool)
    if name == "diagonal":  # items of one block
        keep &= np.arange(shape[0])[:, None] // 64 == np.arange(shape[1]) // 64
    if name == "random":
        keep[10:, :64] = True
        keep[3:9] = False
    if name == "window":
        keep = abs(np.arange(shape[0])[:, None] - np.arange(shape[1])) <= 40
    distance = abs(np.arange(shape[0])[:, None] - np.arange(shape[1]))
    if name == "dilated":
        keep = (distance % 2 == 0) & (distance < 100)
    if name == "far":
        keep = (distance % 7 == 0) & (np.arange(shape[0])[:, None] >= np.arange(shape[1]))
    if name == "blocks":
        keep = np.kron(rng.random([-(-n // 64) for n in shape]) < 0.5, np.ones((64, 64), bool))[: shape[0], : shape[1]]
    if name == "empty rows":
        keep[3:9] = False
        keep[64:192] = False
        keep[:64, 64:128] = True
    return keep


def bits_of(tensor) -> np.ndarray:
    return aligned(tensor.numpy() if tensor.dtype in (torch.float32, torch.int32) else tensor.view(torch.int16).numpy())


class Emulated:
    """A case's operands, and its generated CUDA with few multiprocessors."""

    def __init__(self, case: Case, folder, change=lambda text: text):
        self.given, self.config = given, config = case.problem, case.config
        self.g = Geometry(given, config)
        rng = np.random.default_rng(0)
        dtype = getattr(torch, given.dtype)
        keep = dense(case.mask, given, rng)
        earlier = keep & (rng.random(keep.shape) < 0.5) & given.continues
        if given.continues:
            earlier[20:30] = False  # rows that only this part keeps
            earlier[40:50] = keep[40:50]  # rows that only the earlier part keeps
        tensors = {x: torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv"}
        inputs = [tensors[x].float().numpy() for x in "qkv"]
        bias = sink = counts = None
        if given.has_key_count:
            counts = np.array([150, given.kv_len, 1][: given.key_counts], np.int32)
            tensors["key_count"] = torch.from_numpy(counts)
        if given.bias_shape:
            bias = torch.from_numpy(rng.standard_normal(given.bias_shape, np.float32))
            bias[..., 30:34, :] = torch.finfo(torch.float32).min
            bias[..., 50:52, :] = -torch.inf
            tensors["bias"] = bias = bias.to(getattr(torch, given.bias_dtype))
            bias = bias.double().numpy()
        if given.sink_dtype:
            sink = torch.tensor([1.5, -torch.inf, 300.0])[: given.q_heads].to(getattr(torch, given.sink_dtype))
            tensors["sink"] = sink
            sink = sink.double().numpy()
        expected = attention_reference(replace(given, gives_lse=True), *inputs, keep, bias, sink, counts)
        self.expected, self.expected_lse = expected
        if given.continues:
            part = replace(given, gives_lse=True, sink_dtype=None)  # a sink counts once
            prior, prior_lse = attention_reference(part, *inputs, earlier, bias)
            tensors["prior"] = torch.from_numpy(prior).to(dtype)
            tensors["prior_lse"] = torch.from_numpy(prior_lse.astype(np.float32))
        mask = BlockSparseMask.from_dense(keep & ~earlier, (config.block_m, config.block_n), config.token_stride)
        arrays = map(aligned, specialized.operands(given, config, TARGET, mask).arrays)
        self.arrays = dict(zip(OPERANDS, arrays, strict=True)) | {name: bits_of(x) for name, x in tensors.items()}
        tiles = {"q": self.g.q_tile, "k": self.g.k_tile, "v": self.g.v_tile}
        for name, tile in tiles.items():
            layout = getattr(given.layouts, name)
            offset = layout.offset if isinstance(layout, View) else 0
            rows, stride = (None if name == "q" else config.block_n), config.token_stride
            for suffix, fields in zip(("", "_of_fewer"), tensor_map_fields(given, name, tile, rows, stride)):
                self.arrays[f"{name}_map{suffix}"] = tensor_map(self.arrays[name], offset, fields)
        self.items, self.dtype = self.arrays["items"], dtype
        self.ctas = self.g.grid_size(device.gpu_of(TARGET))
        # The source depends on the number of multiprocessors, by which `source` does not know it apart.
        text = source.__wrapped__(specialized, given, config, "sm_90a")
        self.kernel = EmulatedKernel(change(text), folder)

    def run(self, order, together=1) -> tuple[np.ndarray, np.ndarray | None]:
        """(out, lse) in float64; CTAs in an order, some of them interleaved.  All of the workspace is left zero."""
        arrays = self.arrays
        arrays["partials"][...] = np.nan
        arrays["out"] = aligned(np.full(self.given.shape("out"), 0x7FFF, np.int16))
        if self.given.gives_lse:
            arrays["lse"] = aligned(np.full(self.given.lse_shape, np.nan, np.float32))
        self.kernel(arrays, {"n_items": len(self.items)}, order, self.g.cta_threads, self.g.shared_bytes, together)
        assert not arrays["taken"].any() and not arrays["arrivals"].any(), "the next launch must find what this found"
        out = torch.from_numpy(arrays["out"]).view(self.dtype).double().numpy()
        return out, arrays["lse"].astype(np.float64) if self.given.gives_lse else None


def few_multiprocessors(monkeypatch, number):
    """So few CTAs run at once that each takes several items."""
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=number)])


@pytest.mark.parametrize("name", CASES)
def test_result_and_log_sum_exp(name, monkeypatch, tmp_path):
    case = CASES[name]
    few_multiprocessors(monkeypatch, 2 if case.split else 1)
    emulated = Emulated(case, tmp_path)
    assert (emulated.items[:, Item.SPLITS] > 1).any() == case.split
    order = np.random.default_rng(1).permutation(emulated.ctas)
    out, lse = emulated.run(order)
    eps = torch.finfo(emulated.dtype).eps
    np.testing.assert_allclose(out, emulated.expected, atol=4 * eps, rtol=0)
    if lse is not None:
        np.testing.assert_allclose(lse, emulated.expected_lse, atol=2 * eps, rtol=1e-6)
    again, again_lse = emulated.run(order[::-1], together=len(order))
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(again_lse, lse)


def test_items_are_taken_once_by_whatever_cta_comes_first(monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch, 1)
    emulated = Emulated(Case(problem(260, 200, dim=16, heads=2), config(64, 64, 3), "causal"), tmp_path)
    assert len(emulated.items) > 2 * emulated.ctas > 4
    for i, order in enumerate(islice(permutations(range(emulated.ctas)), 0, None, 5)):
        out, _ = emulated.run(order, together=emulated.ctas if i % 2 else 1)
        np.testing.assert_allclose(out, emulated.expected, atol=4e-3, rtol=0)


@pytest.mark.parametrize("block_n, mask", [(128, "causal"), (64, "blocks")])
def test_two_warpgroups_may_begin_before_the_first_token(block_n, mask, monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch, 1)
    monkeypatch.setattr(geometry, "UNALIGNED_ROWS", 128)
    emulated = Emulated(Case(problem(310, dim=16, heads=2), config(128, block_n), mask), tmp_path)
    assert emulated.items[:, Item.FIRST_ROW].min() == -64
    out, lse = emulated.run(range(emulated.ctas))
    np.testing.assert_allclose(out, emulated.expected, atol=4e-3, rtol=0)
    np.testing.assert_allclose(lse, emulated.expected_lse, atol=2e-3, rtol=1e-6)


def test_rows_before_the_first_token_that_would_be_stored_are_found(monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch, 1)

    def change(text):
        start = text.rindex("main_kernel(")
        signed = text[start:].replace("(uint)", "(int)")
        assert signed != text[start:]
        return text[:start] + signed

    given = problem(60, dim=16, gives_lse=False)
    emulated = Emulated(Case(given, config(192, 64), "causal"), tmp_path, change)
    with pytest.raises(RuntimeError):
        emulated.run(range(emulated.ctas))


CHANGES = {  # of the kernel's text, in which only waits for tiles that have been read await the other parity, "^ 1"
    "no wait for tiles to be read": (r"tvm_builtin_cuda_mbarrier_wait_raw_u32\([^;]*\^ 1\)\);", ""),
    "no wait for tiles to arrive": (r"tvm_builtin_cuda_mbarrier_wait_raw_u32\([^;^]*\);", ""),
    "tiles released twice": (r"(tvm_builtin_ptx_mbarrier_arrive_arrive_[^;]*;)", r"{\1 \1}"),
    "products waited for too late": (r"(wait_group_sync_aligned)_0\(\);(?=\s*pin_float)", r"\1_1();"),
    "no fence after the output": (r"tvm_builtin_ptx_fence_proxy[^;]*;(?=\s*tvm_builtin_cuda_warp_sync)", ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_that_waits_for_less_is_found(name, monkeypatch, tmp_path):
    few_multiprocessors(monkeypatch, 1)
    pattern, other = CHANGES[name]

    def change(text):
        start = text.rindex("main_kernel(")
        body, n = re.subn(pattern, other, text[start:])
        assert n
        return text[:start] + body

    given = problem(200, dim=16, heads=2)
    emulated = Emulated(Case(given, config(64, 64), "causal"), tmp_path, change)
    with pytest.raises((RuntimeError, AssertionError)):
        out, _ = emulated.run(range(emulated.ctas))
        np.testing.assert_allclose(out, emulated.expected, atol=4e-3, rtol=0)
