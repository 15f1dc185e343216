"""The matrix product copied by the tensor memory accelerator: its generated CUDA run on the CPU against NumPy."""

import shutil
from dataclasses import replace

import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated, ctas_of
from tir_kernels.cuda import device
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import tma as gemm_tma
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
from tir_kernels.fusion.gemm.sizes.waves import may_have_tail, parts
from tir_kernels.fusion.problem import GemmProblem, Norm, Step

BIAS, GELU, RESIDUAL = Step("add", "row"), Step("gelu"), Step("add", "matrix")
SHARED_LIMIT = 232448  # of sm_90a
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m, n, k, dtype="float16", steps=(BIAS,), **rest):
    return GemmProblem(m, n, dtype, steps, k=k, **rest)


def config(*sizes, **rest):
    return GemmConfig(*sizes, warpgroup=True, tma=True, **rest)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, w_layout",
    [
        ((64, 64, 64, 4, 1, 3), "nk"),
        ((64, 64, 64, 4, 1, 3), "kn"),
        ((128, 192, 64, 8, 1, 3), "kn"),
        ((128, 128, 64, 4, 2, 4), "nk"),
        ((128, 128, 64, 4, 2, 4), "kn"),
        ((128, 64, 64, 4, 1, 4), "nk"),
        ((192, 128, 64, 12, 1, 3), "nk"),
    ],
    ids=str,
)
def test_copies_by_the_tensor_memory_accelerator(sizes, w_layout, tmp_path):
    given = problem(130, 200, 264, steps=(BIAS, RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, config(*sizes), tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, sets", [((64, 144, 64, 4, 1, 3), 1), ((192, 96, 64, 4, 1, 4), 2), ((64, 160, 64, 4, 1, 3), 2)]
)
def test_widths_that_are_no_power_of_two(sizes, sets, tmp_path):
    given = problem(200, 296, 136, steps=(BIAS, RESIDUAL))
    assert_emulated(gemm_cuda, given, config(*sizes, sets=sets), tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, sets, k",
    [
        ((64, 64, 64, 4, 1, 4), 1, 328),
        ((64, 64, 64, 4, 1, 4), 2, 72),
        ((64, 64, 64, 4, 1, 4), 2, 328),
        ((64, 128, 64, 4, 1, 3), 2, 72),
    ],
)
def test_a_cta_takes_several_tiles(sizes, sets, k, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=1)])
    given = problem(200, 264, k, "bfloat16", (BIAS, GELU))
    one = config(*sizes, sets=sets)
    g = GemmGeometry(given, one)
    assert g.ctas > 4 * ctas_of(g)
    assert_emulated(gemm_cuda, given, one, tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, tail_n, multiprocessors, w_layout, steps",
    [
        # Strips of three tiles: three of five strips fill a wave of 9 CTAs.
        ((64, 128, 64, 4, 1, 10), 64, 9, "nk", (BIAS, GELU)),
        ((64, 128, 64, 4, 1, 10), 96, 9, "nk", (BIAS, RESIDUAL)),
        ((64, 128, 64, 4, 1, 10), 64, 9, "kn", (BIAS,)),
        # Two of five strips for 8 CTAs, two of which begin with narrow tiles.
        ((64, 128, 64, 4, 1, 10), 96, 8, "nk", ()),
        # Three of four strips for two waves of 5 CTAs, one of which has a narrow tile in its second turn.
        ((192, 128, 64, 12, 1, 4), 64, 5, "nk", (BIAS,)),
    ],
)
def test_narrow_tiles_after_whole_waves(sizes, tail_n, multiprocessors, w_layout, steps, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=multiprocessors)])
    rows = 3 * 192 + 16 if sizes[0] == 192 else 4 * 64 + 24
    given, one = problem(rows, 296, 136, "bfloat16", steps, w_layout=w_layout), config(*sizes, tail_n=tail_n)
    g = GemmGeometry(given, one)
    assert g.ctas_per_multiprocessor == 1 and len(parts(g, multiprocessors)) == 2
    assert_emulated(gemm_cuda, given, one, tmp_path)


def test_what_may_have_narrow_tiles():
    def may(tail_n, sizes=(128, 256, 64, 8, 1, 4), multiprocessors=132, **rest):
        gpu = replace(device.H200, multiprocessors=multiprocessors)
        given = problem(**{"m": 9712, "n": 768, "k": 768} | rest)
        return may_have_tail(GemmGeometry(given, config(*sizes)), tail_n, gpu, SHARED_LIMIT)

    assert may(192) and may(64) and may(64, gate="silu", steps=())
    assert not may(192, m=5632)  # whole waves
    assert not may(192, m=4096)  # none
    assert may(192, k=320) and not may(192, k=256)
    assert not may(96, w_layout="kn") and may(128, w_layout="kn")
    assert not may(192, statistics=True)
    assert not may(192, m=9712 * 3, batch=3)
    # A warp of 160 columns passes 32 of them at a time through shared memory, one of 64 all of them.
    assert may(96, (128, 160, 64, 8, 1, 6)) and not may(64, (128, 160, 64, 8, 1, 6))
    assert not may(64, (64, 128, 64, 4, 1, 4))  # two CTAs a multiprocessor
    assert not may(256) and not may(320)  # no narrower
    # What cannot be is illegal wherever it comes from, a list of cases or a log.
    assert not legal(GemmGeometry(problem(9712, 768, 768), config(128, 160, 64, 8, 1, 6, tail_n=64)), SHARED_LIMIT)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, sets",
    [
        ((128, 256, 64, 8, 1, 3), 1),
        ((64, 256, 64, 4, 2, 3), 1),
        ((192, 96, 64, 4, 1, 4), 2),
        ((64, 144, 64, 4, 1, 3), 1),
        ((128, 112, 64, 4, 1, 4), 2),
    ],
)
@pytest.mark.parametrize("dtype, steps", [("float16", (BIAS, GELU, Step("multiply", "row"))), ("bfloat16", ())])
def test_steps_of_columns_are_applied_to_the_accumulators(sizes, sets, dtype, steps, tmp_path):
    """Several row tiles of a warp, parts of its columns, and operands of both; rows and columns end inside of tiles."""
    given, one = problem(210, 296, 136, dtype, steps), config(*sizes, sets=sets)
    assert GemmGeometry(given, one).finishes_in_registers
    assert_emulated(gemm_cuda, given, one, tmp_path)


def test_what_needs_more_than_a_columns_number_is_not_finished_in_registers():
    one = config(128, 256, 64, 8, 1, 4)
    finishes = lambda given, tile=one: GemmGeometry(given, tile).finishes_in_registers
    assert finishes(problem(512, 768, 768, steps=(BIAS, Step("multiply", "row"))))
    assert finishes(problem(512, 768, 768)) and finishes(problem(512, 768, 768, steps=()))
    assert not finishes(problem(512, 768, 768, steps=(BIAS, RESIDUAL)))
    assert finishes(problem(512, 766, 768)) and finishes(problem(512, 767, 768, steps=(GELU,)))
    assert not finishes(problem(512, 767, 768))
    assert not finishes(problem(512, 768, 768, steps=(), gate="silu"))
    assert not finishes(problem(512, 768, 768, statistics=True))
    assert not finishes(problem(512, 768, 768, a_norm=Norm("layer_norm", 1e-5, False, False)))
    assert not finishes(problem(512, 768, 768), replace(one, tma=False))


@needs_gxx
@pytest.mark.parametrize("sizes, sets", [((64, 64, 64, 4, 1, 4), 2), ((128, 112, 64, 4, 1, 4), 1)])
@pytest.mark.parametrize("columns, steps", [(133, (BIAS,)), (133, ()), (134, (BIAS, GELU)), (132, (BIAS,)), (36, ())])
def test_rows_that_begin_anywhere(sizes, sets, columns, steps, tmp_path):
    """Lanes store as many elements at once as divide the columns; an odd number of them has its vectors read singly."""
    given, one = problem(70, columns, 136, steps=steps), config(*sizes, sets=sets)
    assert GemmGeometry(given, one).finishes_in_registers == (columns % 2 == 0 or not steps)
    assert_emulated(gemm_cuda, given, one, tmp_path)


@needs_gxx
@pytest.mark.parametrize("w_layout, sets, matrices", [("nk", 1, 3), ("nk", 2, 1), ("kn", 2, 3), ("kn", 2, 1)])
def test_a_batch_of_products(w_layout, sets, matrices, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=2)])
    k = 136 if w_layout == "nk" else 128
    given = problem(3 * 100, 136, k, "bfloat16", (BIAS, RESIDUAL), w_layout=w_layout, batch=3, matrices=matrices)
    assert_emulated(gemm_cuda, given, config(64, 64, 64, 4, 1, 4, sets=sets), tmp_path)


@needs_gxx
@pytest.mark.parametrize("n, sets, matrices", [(14, 1, 3), (14, 2, 1), (77, 2, 3), (68, 1, 3)])
def test_a_batch_of_products_of_odd_columns(n, sets, matrices, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=2)])
    given = problem(3 * 100, n, 72, batch=3, matrices=matrices)
    assert_emulated(gemm_cuda, given, config(64, 64, 64, 4, 1, 4, sets=sets), tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, sets",
    [
        ((64, 64, 64, 4, 1, 4), 2),
        ((128, 128, 64, 4, 1, 4), 2),
        ((64, 192, 64, 4, 2, 3), 1),
        ((192, 128, 64, 12, 1, 4), 1),
        ((192, 192, 64, 12, 1, 4), 1),
        ((64, 160, 64, 4, 1, 7), 2),
        ((64, 192, 64, 4, 1, 6), 2),
    ],
)
def test_gated_products(sizes, sets, tmp_path):
    given = problem(130, 200, 136, "bfloat16", (RESIDUAL,), gate="silu", gate_bias=True)
    assert_emulated(gemm_cuda, given, config(*sizes, sets=sets), tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "sizes",
    [
        (64, 64, 64, 4, 1, 12),
        (64, 128, 64, 4, 1, 4),
        (64, 192, 64, 4, 2, 6),
        (64, 256, 64, 4, 2, 5),
        (128, 64, 64, 8, 1, 8),
        (128, 96, 64, 8, 1, 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 16])
def test_gated_products_of_few_rows(sizes, rows, tmp_path):
    """Tiles that are chosen where a gate and its values are one product."""
    given = problem(rows, 264, 264, "bfloat16", (), gate="silu")
    assert_emulated(gemm_cuda, given, config(*sizes), tmp_path)


def test_no_columns_of_w_beyond_a_panel_and_no_norms():
    narrow = (128, 96, 64, 8, 1, 4)
    assert legal(GemmGeometry(problem(512, 768, 768), config(*narrow)), SHARED_LIMIT)
    assert not legal(GemmGeometry(problem(512, 768, 768, w_layout="kn"), config(*narrow)), SHARED_LIMIT)

    given, sizes = problem(512, 768, 768), (128, 128, 64, 8, 1, 4)
    assert legal(GemmGeometry(given, config(*sizes)), SHARED_LIMIT)
    with_norm = problem(512, 768, 768, norm=Norm("layer_norm", 1e-5))
    assert not legal(GemmGeometry(with_norm, config(*sizes)), SHARED_LIMIT)


def test_tensor_maps_are_innermost_first():
    assert gemm_tma.tensor_map_fields((300, 72), (128, 64)) == (72, 300, 144, 64, 128, 1, 1, 0, 3, 2, 0)


@pytest.mark.parametrize("w_layout, is_legal", [("nk", True), ("kn", False)])
@pytest.mark.parametrize(
    "sizes",
    [config(64, 192, 64, 4, 2, 3), config(64, 128, 64, 4, 1, 6, 2)],
    ids=["half a panel more to the second warpgroup", "a cluster with two panels"],
)
def test_what_was_wrong_on_a_gpu_is_illegal(sizes, w_layout, is_legal):
    """Weights along k.  The emulator finds the first, not the second: its shared addresses hold no rank."""
    given = problem(512, 768, 3072, w_layout=w_layout)
    assert legal(GemmGeometry(given, sizes), SHARED_LIMIT) is is_legal
