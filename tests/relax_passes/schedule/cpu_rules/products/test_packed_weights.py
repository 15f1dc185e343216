"""Constant matrices in panels: what is stored, the numbers of ragged products, and what stays as it is."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir.expr import GenericConst

from relax_passes.schedule.cpu import cpu_functions, cpu_passes
from relax_passes.schedule.cpu_rules.products.packed_weights import PackWeights, Panels
from relax_passes.schedule.cpu_rules.products.tile import choose_panel_tile, panel_vectors
from relax_passes.schedule.cpu_rules.simd import Simd
from tests.relax_passes.fusion.modules import module_of
from tir_kernels.target import parse_target

TARGET = parse_target({"kind": "llvm", "mcpu": "haswell"})  # 16 registers of 8 lanes


def tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constant(x):
    return relax.const(tvm.runtime.from_dlpack(x))


def module(build, *shapes, dtype="float32"):
    """A module whose "main" is `build(builder, *parameters)`."""
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    return module_of(params, lambda builder: build(builder, *params))


def packed(mod):
    """The module behind `PackWeights`, unscheduled."""
    with TARGET:
        mod = tvm.transform.Sequential(cpu_functions())(mod)
        return PackWeights(TARGET)(mod), mod


def run(mod, *inputs):
    with TARGET:
        built = tvm.compile(tvm.transform.Sequential(cpu_passes(TARGET))(mod), target=TARGET)
    return relax.VirtualMachine(built, tvm.cpu())["main"](*inputs)


def constants(mod) -> list[np.ndarray]:
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda x: found.append(x.value.numpy()) if isinstance(x, GenericConst) else None
    )
    return found


def product_shapes(mod) -> list[tuple]:
    """The shapes of all parameters of rank 3 or 2 that products read as their matrix."""
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return [tuple(map(int, f.params[1].ty.shape)) for f in functions]


def linear(weight, bias=None, residual=False):
    def build(builder, x):
        y = builder.emit(relax.op.matmul(x, constant(weight)))
        y = y if bias is None else builder.emit(relax.op.add(y, constant(bias)))
        return builder.emit(relax.op.add(builder.emit(relax.op.nn.gelu(y)), x)) if residual else y

    return build


def test_panels_are_the_columns_of_a_tile_padded_with_zeros():
    matrix = np.arange(6, dtype="float32").reshape(2, 3)
    expected = [[[0, 1], [3, 4]], [[2, 0], [5, 0]]]
    assert Panels(2, False).pack(matrix).tolist() == expected
    assert Panels(2, True).pack(matrix.T.copy()).tolist() == expected


def test_a_weight_becomes_panels_and_no_call_copies_it():
    weight = tensor(32, 48)
    after, before = packed(module(linear(weight), (1, 8, 32)))
    assert product_shapes(before) == [(32, 48)] and product_shapes(after) == [(2, 32, 24)]
    (stored,) = constants(after)
    np.testing.assert_array_equal(stored, weight.numpy().reshape(32, 2, 24).transpose(1, 0, 2))
    with TARGET:
        scheduled = tvm.transform.Sequential(cpu_passes(TARGET))(module(linear(weight), (1, 8, 32)))
    (func,) = (f for f in scheduled.functions.values() if isinstance(f, tirx.PrimFunc))
    blocks = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, lambda block: blocks.append(block.name_hint)), order="post")
    assert not [name for name in blocks if "weight" in name or "_pad" in name or name.startswith("lv")]


SHAPES = [  # x, columns
    ((1, 128, 64), 96),
    ((1, 13, 31), 50),  # neither rows nor columns are whole tiles
    ((197, 16), 48),
    ((1, 40), 72),  # one row
    ((3, 5, 24), 8),
    ((2, 2, 7, 24), 100),
    ((40,), 64),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape, columns", SHAPES, ids=str)
def test_numbers(shape, columns, has_bias):
    x, weight, bias = tensor(*shape), tensor(shape[-1], columns, seed=1), tensor(columns, seed=2)
    mod = module(linear(weight, bias if has_bias else None), shape)
    after, before = packed(mod)
    assert product_shapes(after) != product_shapes(before)
    expected = x.double() @ weight.double() + (bias.double() if has_bias else 0)
    torch.testing.assert_close(run(mod, x).double(), expected, rtol=1e-5, atol=1e-4)


def test_an_epilogue_reads_the_tile():
    x, weight, bias = tensor(1, 13, 40), tensor(40, 40, seed=1) / 6, tensor(40, seed=2)
    expected = torch.nn.functional.gelu(x @ weight + bias) + x
    torch.testing.assert_close(run(module(linear(weight, bias, True), (1, 13, 40)), x), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_of_two_products_is_stored_once():
    weight = tensor(24, 24)

    def twice(builder, x):
        same = constant(weight)
        return relax.op.matmul(builder.emit(relax.op.matmul(x, same)), same)

    after, _ = packed(module(twice, (1, 8, 24)))
    calls = after["main"].body.blocks[0].bindings
    first, second = (binding.value.args[1].fields[1] for binding in calls[:2])
    assert first.same_as(second) and first.value.numpy().shape == (1, 24, 24)


@pytest.mark.parametrize("mcpu", ["nehalem", "haswell", "skylake-avx512"])
@pytest.mark.parametrize("columns", [50, 64, 72, 192, 1000])
def test_all_numbers_of_rows_have_the_same_panels(columns, mcpu):
    target = parse_target({"kind": "llvm", "mcpu": mcpu})
    weight, stored = tensor(8, columns), []
    for rows in (1, 2, 3, 4, 5, 7, 8, 21, 24, 128, tirx.Var("rows", "int64")):
        with target:
            mod = tvm.transform.Sequential(cpu_functions())(module(linear(weight), (rows, 8)))
            stored += constants(PackWeights(target)(mod))
    assert len(stored) == 11 and all(x.ndim == 3 and np.array_equal(x, stored[0]) for x in stored)


def test_symbolic_rows():
    weight, rows = tensor(32, 48), tirx.Var("rows", "int64")
    mod = module(linear(weight, tensor(48, seed=2)), (rows, 32))
    with TARGET:
        built = tvm.compile(tvm.transform.Sequential(cpu_passes(TARGET))(mod), target=TARGET)
    machine = relax.VirtualMachine(built, tvm.cpu())
    for count in (1, 7, 16):
        x = tensor(count, 32, seed=3)
        expected = x @ weight + tensor(48, seed=2)
        torch.testing.assert_close(machine["main"](x), expected, rtol=1e-5, atol=1e-4)


def unchanged(mod) -> bool:
    after, before = packed(mod)
    return after.same_as(before)


def test_what_is_no_constant_stays():
    assert unchanged(module(lambda _, x, w: relax.op.matmul(x, w), (8, 32), (32, 48)))


def test_a_function_that_one_call_gives_a_variable_stays():
    weight = tensor(24, 24)

    def build(builder, x, w):
        return relax.op.matmul(builder.emit(relax.op.matmul(x, constant(weight))), w)

    assert unchanged(module(build, (8, 24), (24, 24)))


def test_a_matrix_that_is_read_otherwise_stays():
    weight = tensor(24, 24)

    def build(builder, x):
        same = constant(weight)
        return relax.op.add(builder.emit(relax.op.matmul(x, same)), same)

    mod = module(build, (24, 24))
    assert unchanged(mod)
    x = tensor(24, 24, seed=1)
    torch.testing.assert_close(run(mod, x), x @ weight + weight, rtol=1e-5, atol=1e-4)


def test_half_precision_stays():
    weight = tensor(32, 48).half()
    assert unchanged(module(linear(weight), (8, 32), dtype="float16"))


@pytest.mark.parametrize("rows, columns", [(128, 768), (197, 2304), (1, 30522), (None, 768), (7, 1000), (5, 3)])
@pytest.mark.parametrize("simd", [Simd(16, 32), Simd(8, 16), Simd(4, 16), Simd(4, 32)], ids=str)
def test_a_tile_leaves_registers_for_its_operands(rows, columns, simd):
    tile = choose_panel_tile(rows, columns, simd)
    assert tile.rows * tile.vectors + 1 + (tile.vectors if tile.rows > 1 else 0) <= simd.registers
    width = panel_vectors(columns, simd)
    panels = -(-columns // (width * simd.lanes))
    assert tile.lanes == simd.lanes and tile.pads_columns == (columns % (width * simd.lanes) != 0)
    assert tile.vectors % width == 0 and panels % (tile.vectors // width) == 0  # whole tiles, of whole panels
    assert rows is None or tile.pads_rows == (rows % tile.rows != 0)


def test_tiles_of_many_rows_hide_the_latency_of_multiply_adds():
    shapes = {(t.rows, t.vectors) for m in (128, 197, 512, None) for t in [choose_panel_tile(m, 768, Simd(8, 16))]}
    assert shapes == {(4, 3), (6, 2)}


@pytest.mark.parametrize("rows", [8, 197])
def test_the_inner_loop_is_multiply_adds_in_registers(rows):
    """No accumulator is loaded or stored between the multiply-adds, and every row of B once."""
    mod = module(linear(tensor(64, 192), tensor(192, seed=1)), (1, rows, 64))
    with TARGET:
        mod = tvm.transform.Sequential(cpu_passes(TARGET))(mod)
        (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
        built = tvm.compile(func.with_attr("global_symbol", "product"), target=TARGET)
    loops, loop = [], []
    for line in built.mod.inspect_source("asm").splitlines():
        loop = [line] if line.startswith(".LBB") else [*loop, line]
        if line.lstrip().startswith("j"):
            loops.append(loop)
            loop = []
    counts = lambda loop: sum("vfmadd" in line for line in loop)
    hot = max(loops, key=counts)
    assert counts(hot) % 12 == 0 and counts(hot) and all("ymm" in line for line in hot if "vfmadd" in line)
    assert not [line for line in hot if "ymm" in line and "rsp" in line]
