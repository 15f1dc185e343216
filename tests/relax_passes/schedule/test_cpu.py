"""Operators on LLVM: every rule against PyTorch on ragged shapes, what it schedules, and what it leaves alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from tvm import relax, s_tir, te, tirx
from tvm.script import tirx as T

from relax_passes.schedule.cpu import ScheduleForCPU, cpu_passes
from relax_passes.schedule.cpu_rules.products.contraction import match_contraction
from relax_passes.schedule.cpu_rules.products.tile import choose_tile
from relax_passes.schedule.cpu_rules.simd import Simd, simd_of
from tests.models.quick_llvm import QUICK_LLVM, run_linked
from tir_kernels.target import parse_target

TARGET = parse_target("llvm")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def lower(build, *tensors, constants=()):
    """The module of `build(builder, *variables)` after `cpu_passes`; tensors listed in `constants` are bound."""
    builder = relax.BlockBuilder()
    names = {str(dtype): str(dtype).removeprefix("torch.") for dtype in {t.dtype for t in tensors}}
    variables = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), names[str(t.dtype)])) for i, t in enumerate(tensors)
    ]
    params = [v for i, v in enumerate(variables) if i not in constants]
    operands = [
        relax.const(tvm.runtime.from_dlpack(t)) if i in constants else v
        for i, (t, v) in enumerate(zip(tensors, variables, strict=True))
    ]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *operands))
        builder.emit_func_output(result)
    with TARGET:
        return tvm.transform.Sequential(cpu_passes(TARGET))(builder.finalize())


def run(build, *tensors, constants=()):
    """The compiled result as a torch tensor, and the scheduled module."""
    mod = lower(build, *tensors, constants=constants)
    with QUICK_LLVM:  # schedules are the target's; LLVM's optimizer takes 11 s for one of them in bfloat16
        machine = run_linked(tvm.compile(mod, target=QUICK_LLVM))
    return machine["main"](*(t for i, t in enumerate(tensors) if i not in constants)), mod


def check(build, reference, *tensors, constants=()):
    """Compare with PyTorch, computed in double precision; the module, for a look at its structure."""
    result, mod = run(build, *tensors, constants=constants)
    expected = reference(*(t.double() if t.is_floating_point() else t for t in tensors))
    if result.is_floating_point():
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert torch.equal(result.long(), expected.long())
    return mod


def kernels(mod) -> dict:
    return {str(v.name_hint): f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}


def loop_kinds(func) -> set:
    kinds = set()
    tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: kinds.add(loop.kind) and None), order="post")
    return kinds


def tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


MATMULS = [
    ((1, 97, 80), (80, 130)),  # rows, columns and k that divide nothing
    ((2, 64, 32), (32, 96)),
    ((1, 256), (256, 512)),  # matrix-vector
    ((3, 5, 40), (40, 2)),
    ((2, 3, 17, 31), (2, 3, 31, 33)),  # batched
    ((2, 3, 16, 31), (31, 48)),
    ((4, 1, 24), (24, 64)),
    ((2, 1, 9, 8), (1, 3, 8, 16)),  # broadcast
    ((301, 64), (64, 64)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("a_shape, b_shape", MATMULS, ids=str)
def test_matmul(a_shape, b_shape, dtype):
    a, b = tensor(*a_shape, dtype=dtype), tensor(*b_shape, dtype=dtype, seed=1) / b_shape[-2] ** 0.5
    check(lambda _, x, y: relax.op.matmul(x, y), torch.matmul, a, b)


@pytest.mark.parametrize("a_shape, b_shape", [((7, 24), (24,)), ((24,), (24, 40)), ((24,), (24,))], ids=str)
def test_matmul_with_a_vector(a_shape, b_shape):
    check(lambda _, x, y: relax.op.matmul(x, y), torch.matmul, tensor(*a_shape), tensor(*b_shape, seed=1))


def linear(activation):
    """x Wᵀ + b, an activation and a residual, as a torch.nn.Linear comes in."""

    def build(builder, x, weight, bias, residual):
        y = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(weight))))
        y = builder.emit(activation(builder.emit(relax.op.add(y, bias))))
        return relax.op.add(y, residual)

    return build


ACTIVATIONS = {
    "gelu": (relax.op.nn.gelu, F.gelu),
    "gelu_tanh": (relax.op.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    "relu": (relax.op.nn.relu, F.relu),
    "silu": (relax.op.nn.silu, F.silu),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_is_one_kernel_on_a_transposed_constant(activation, dtype):
    ours, reference = ACTIVATIONS[activation]
    x, weight = tensor(1, 50, 64, dtype=dtype), tensor(96, 64, dtype=dtype, seed=1) / 8
    bias, residual = tensor(96, dtype=dtype, seed=2), tensor(1, 50, 96, dtype=dtype, seed=3)
    mod = check(
        linear(ours),
        lambda x, w, b, r: reference(F.linear(x, w, b)) + r,
        *(x, weight, bias, residual),
        constants=(1, 2),
    )
    (func,) = kernels(mod).values()
    shapes = [tuple(int(size) for size in param.ty.shape) for param in func.params]
    is_in_panels = any(shape[1:-1] == (64,) and shape[0] * shape[-1] >= 96 and len(shape) == 3 for shape in shapes[1:])
    assert is_in_panels if dtype == torch.float32 else (64, 96) in shapes
    assert (96, 64) not in shapes
    assert {tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED} <= loop_kinds(func)


READERS = {
    "padded": (
        lambda y: relax.op.nn.pad(y, [0, 0, 0, 0, 0, 1], "constant", -3.0),
        lambda y: F.pad(y, (0, 1), value=-3.0),
    ),
    "padded before": (
        lambda y: relax.op.nn.pad(y, [0, 0, 1, 0, 0, 0], "constant", 2.0),
        lambda y: F.pad(y, (0, 0, 1, 0), value=2.0),
    ),
    "joined": (lambda y: relax.op.concat([y, y], 2), lambda y: torch.cat([y, y], 2)),
    "repeated": (lambda y: relax.op.repeat(y, 2, 1), lambda y: y.repeat_interleave(2, 1)),
    "reversed": (lambda y: relax.op.flip(y, 2), lambda y: y.flip(2)),
    "every second": (lambda y: relax.op.strided_slice(y, [2], [1], [12], [2]), lambda y: y[..., 1:12:2]),
    "transposed": (lambda y: relax.op.permute_dims(y, [2, 0, 1]), lambda y: y.permute(2, 0, 1)),
    "heads": (
        lambda y: relax.op.permute_dims(relax.op.reshape(y, (3, 10, 3, 4)), [0, 2, 1, 3]),
        lambda y: y.reshape(3, 10, 3, 4).permute(0, 2, 1, 3),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_product_otherwise_than_element_by_element(name):
    ours, reference = READERS[name]
    build = lambda builder, x, w: ours(builder.emit(relax.op.matmul(x, w)))
    check(build, lambda x, w: reference(x @ w), tensor(3, 10, 12), tensor(12, 12, seed=1), constants=(1,))


def test_product_of_a_variable_transposed_matrix():
    def build(_, x, y):
        return relax.op.matmul(x, relax.op.permute_dims(y, [0, 1, 3, 2]))

    a, b = tensor(1, 2, 33, 16), tensor(1, 2, 41, 16, seed=1)
    check(build, lambda a, b: a @ b.transpose(2, 3), a, b)


@pytest.mark.parametrize("shape", [(40, 7), (4, 5, 33), (1, 9, 97), (300, 64), (2, 3, 5, 128), (100, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_softmax(shape, dtype):
    x = 4 * tensor(*shape, dtype=dtype)
    check(lambda _, x: relax.op.nn.softmax(x), lambda x: x.softmax(-1), x)


def test_softmax_with_minus_infinity_and_large_values():
    x = 50 * tensor(8, 33)
    x[:, ::3] = -np.inf
    check(lambda _, x: relax.op.nn.softmax(x), lambda x: x.softmax(-1), x)


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_over_an_outer_axis(axis):
    check(lambda _, x: relax.op.nn.softmax(x, axis), lambda x: x.softmax(axis), tensor(19, 21, 5))


@pytest.mark.parametrize("shape", [(1, 50, 80), (3, 97), (600, 64), (2, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm(shape, dtype):
    x, gamma, beta = (tensor(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape[-1:], shape[-1:])))
    check(
        lambda _, x, g, b: relax.op.nn.layer_norm(x, g, b, axes=[-1]),
        lambda x, g, b: F.layer_norm(x, shape[-1:], g, b),
        *(x, gamma, beta),
    )


def test_layer_norm_over_two_axes():
    check(
        lambda _, x, g, b: relax.op.nn.layer_norm(x, g, b, axes=[-2, -1]),
        lambda x, g, b: F.layer_norm(x, (6, 35), g, b),
        *(tensor(4, 6, 35), tensor(6, 35, seed=1), tensor(6, 35, seed=2)),
    )


def test_rms_norm():
    check(
        lambda _, x, w: relax.op.nn.rms_norm(x, w, axes=[-1], epsilon=1e-6),
        lambda x, w: F.rms_norm(x, (72,), w, 1e-6),
        *(tensor(2, 33, 72), tensor(72, seed=1)),
    )


REDUCTIONS = {
    "sum": (relax.op.sum, lambda x, axis, keep: x.sum(axis, keepdim=keep)),
    "mean": (relax.op.mean, lambda x, axis, keep: x.mean(axis, keepdim=keep)),
    "max": (relax.op.max, lambda x, axis, keep: x.amax(axis, keepdim=keep)),
    "min": (relax.op.min, lambda x, axis, keep: x.amin(axis, keepdim=keep)),
    "prod": (relax.op.prod, lambda x, axis, keep: x.prod(axis, keepdim=keep)),
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name, axis, keepdims):
    ours, reference = REDUCTIONS[name]
    x = tensor(9, 21, 150) / 4
    check(lambda _, x: ours(x, [axis], keepdims), lambda x: reference(x, axis, keepdims), x)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 1000])
def test_reduction_of_every_length(length):
    check(lambda _, x: relax.op.sum(x, [-1]), lambda x: x.sum(-1), tensor(3, length))
    check(lambda _, x: relax.op.max(x, [-1]), lambda x: x.amax(-1), -tensor(3, length).abs())


def test_reduction_to_one_number():
    check(lambda _, x: relax.op.sum(x), lambda x: x.sum(), tensor(33, 70))


def test_argmax():
    check(lambda _, x: relax.op.argmax(x, -1), lambda x: x.argmax(-1), tensor(37, 97))


def test_reductions_are_vectorised():
    mod = lower(lambda _, x: relax.op.nn.softmax(x), tensor(512, 128))
    (func,) = kernels(mod).values()
    assert {tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED} <= loop_kinds(func)


ELEMENTWISE = {
    "one axis": (lambda _, x: relax.op.exp(x), lambda x: x.exp(), [(1001,)]),
    "long axis": (lambda _, x: relax.op.exp(x), lambda x: x.exp(), [(40000,)]),
    "scalar": (lambda _, x: relax.op.exp(x), lambda x: x.exp(), [()]),
    "short last axis": (lambda _, x: relax.op.multiply(x, x), lambda x: x * x, [(300, 3)]),
    "broadcast": (lambda _, x, y: relax.op.add(x, y), lambda x, y: x + y, [(7, 1, 33), (5, 1)]),
    "transpose": (lambda _, x: relax.op.permute_dims(x, [0, 2, 1]), lambda x: x.permute(0, 2, 1), [(3, 35, 50)]),
    "heads": (
        lambda _, x: relax.op.permute_dims(relax.op.reshape(x, (1, 50, 4, 24)), [0, 2, 1, 3]),
        lambda x: x.reshape(1, 50, 4, 24).permute(0, 2, 1, 3),
        [(1, 50, 96)],
    ),
    "concat": (lambda _, x, y: relax.op.concat([x, y], -1), lambda x, y: torch.cat([x, y], -1), [(9, 33), (9, 18)]),
    "strided slice": (
        lambda _, x: relax.op.strided_slice(x, [1], [3], [40], [2]),
        lambda x: x[:, 3:40:2],
        [(20, 50)],
    ),
    "where": (
        lambda _, x, y: relax.op.where(relax.op.greater(x, y), x, relax.op.tanh(y)),
        lambda x, y: torch.where(x > y, x, y.tanh()),
        [(11, 65), (11, 65)],
    ),
    "cumsum": (lambda _, x: relax.op.cumsum(x, 1), lambda x: x.cumsum(1), [(6, 30)]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_and_data_movement(name):
    ours, reference, shapes = ELEMENTWISE[name]
    check(ours, reference, *(tensor(*shape, seed=i) for i, shape in enumerate(shapes)))


def test_embedding():
    table, indices = tensor(50, 72), torch.randint(50, (33,), generator=torch.Generator().manual_seed(0))
    check(lambda _, t, i: relax.op.take(t, i, axis=0), lambda t, i: t[i], table, indices)


@pytest.mark.parametrize("stride, padding", [(16, 0), (1, 1), (2, 1)])
def test_convolution(stride, padding):
    size = 16 if stride == 16 else 3
    x, weight = tensor(1, 3, 48, 48), tensor(8, 3, size, size, seed=1)
    check(
        lambda _, x, w: relax.op.nn.conv2d(x, w, strides=stride, padding=padding),
        lambda x, w: F.conv2d(x, w, stride=stride, padding=padding),
        *(x, weight / size),
    )


def test_dense_attention_in_one_function():
    """Several products and reductions in one PrimFunc: each gets its rule."""
    q, k, v = tensor(1, 33, 2, 16), tensor(1, 41, 2, 16, seed=1), tensor(1, 41, 2, 24, seed=2)
    bias = tensor(1, 1, 33, 41, seed=3)

    def reference(q, k, v, bias):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)

    mod = check(lambda _, q, k, v, b: relax.op.nn.attention(q, k, v, b), reference, q, k, v, bias)
    (func,) = kernels(mod).values()
    assert {tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED} <= loop_kinds(func)


@pytest.mark.parametrize(("rows", "copies"), [(512, True), (12, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matrix_is_copied_in_tiles_where_several_row_tiles_read_it(rows, copies, dtype):
    x, y = tensor(rows, 64, dtype=dtype), tensor(64, 512, seed=1, dtype=dtype) / 8
    (func,) = kernels(check(lambda _, x, y: relax.op.matmul(x, y), torch.matmul, x, y)).values()
    names = set()
    note = lambda block: names.update(buffer.name for buffer in block.alloc_buffers)
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, note), order="post")
    assert any(name.startswith("x1") for name in names) == copies


def test_batched_product_is_parallel():
    mod = lower(lambda _, x, y: relax.op.matmul(x, y), tensor(32, 24, 24), tensor(32, 24, 24, seed=1))
    (func,) = kernels(mod).values()
    assert tirx.ForKind.PARALLEL in loop_kinds(func)


def test_symbolic_lengths():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((1, n, 48), "float32"))
    weight = tensor(48, 80)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, relax.const(tvm.runtime.from_dlpack(weight))))
            scores = builder.emit(relax.op.matmul(y, builder.emit(relax.op.permute_dims(y, [0, 2, 1]))))
            result = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.nn.gelu(scores))))
        builder.emit_func_output(result)
    with TARGET:
        mod = tvm.transform.Sequential(cpu_passes(TARGET))(builder.finalize())
        machine = relax.VirtualMachine(tvm.compile(mod, target=TARGET), tvm.cpu())
    for length in (1, 8, 37):
        value = tensor(1, length, 48) / 8
        y = value @ weight
        expected = F.gelu(y @ y.transpose(1, 2)).softmax(-1)
        torch.testing.assert_close(machine["main"](value), expected, rtol=1e-4, atol=1e-5)


def test_scheduled_functions_are_unchanged():
    x = te.placeholder((1000, 64), name="x")
    func = te.create_prim_func([x, te.compute((1000, 64), lambda i, j: x[i, j] + 1.0)])
    kept = func.with_attr("tirx.is_scheduled", True)
    mod = ScheduleForCPU(TARGET)(tvm.IRModule({"kept": kept, "free": func}))
    tvm.ir.assert_structural_equal(mod["kept"], kept)
    assert tirx.ForKind.PARALLEL in loop_kinds(mod["free"]) and mod["free"].attrs["tirx.is_scheduled"]


def test_reduction_over_an_outer_axis_is_parallel():
    mod = lower(lambda _, x: relax.op.sum(x, [1]), tensor(8, 60, 50))
    (func,) = kernels(mod).values()
    assert tirx.ForKind.PARALLEL in loop_kinds(func)


def test_small_work_stays_serial():
    mod = lower(lambda _, x, y: relax.op.matmul(x, y), tensor(4, 8), tensor(8, 8))
    (func,) = kernels(mod).values()
    assert tirx.ForKind.PARALLEL not in loop_kinds(func)


@T.prim_func(s_tir=True)
def recurrence(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    with T.sblock("scan"):
        T.reads(x[0:8])
        T.writes(y[0:8])
        y[0] = x[0]
        for t in range(7):
            y[t + 1] = y[t] * T.float32(0.5) + x[t + 1]


def test_opaque_function_keeps_its_loops():
    """A recurrence is neither map nor reduction."""
    mod = ScheduleForCPU(TARGET)(tvm.IRModule({"main": recurrence}))
    tvm.ir.assert_structural_equal(mod["main"].body, recurrence.body)
    x, y = tensor(8), torch.empty(8)
    tvm.compile(mod, target=TARGET)["main"](x, y)
    expected = [x[0]]
    for t in range(1, 8):
        expected.append(expected[-1] * 0.5 + x[t])
    torch.testing.assert_close(y, torch.stack(expected))


@pytest.mark.parametrize("rows, columns", [(1024, 768), (97, 130), (1, 30522), (None, None), (7, 48), (1023, 1000)])
@pytest.mark.parametrize("simd", [Simd(16, 32), Simd(8, 16), Simd(4, 16), Simd(4, 32)], ids=str)
def test_tile_fits_the_registers_and_covers_the_matrix(rows, columns, simd):
    tile = choose_tile(rows, columns, simd)
    assert tile.rows * tile.vectors <= simd.accumulators
    assert 4 <= tile.lanes <= simd.lanes
    if rows is not None:
        assert tile.pads_rows == (rows % tile.rows != 0)
        assert columns % tile.columns == 0 or tile.pads_columns


def test_vectors_of_targets():
    targets = {cpu: parse_target({"kind": "llvm", "mcpu": cpu}) for cpu in ("znver4", "haswell", "nehalem")}
    assert {cpu: simd_of(target).lanes for cpu, target in targets.items()} == {"znver4": 16, "haswell": 8, "nehalem": 4}


def test_narrow_targets_give_the_same_numbers():
    target = parse_target({"kind": "llvm", "mcpu": "haswell"})
    x, weight = tensor(50, 70), tensor(70, 90, seed=1)
    a, b = te.placeholder((50, 70), name="a"), te.placeholder((70, 90), name="b")
    k = te.reduce_axis((0, 70), name="k")
    product = te.compute((50, 90), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    mod = ScheduleForCPU(target)(tvm.IRModule({"main": te.create_prim_func([a, b, product])}))
    result = torch.empty(50, 90)
    tvm.compile(mod, target=target)["main"](x, weight, result)
    torch.testing.assert_close(result, x @ weight, rtol=1e-5, atol=1e-4)


def test_contraction_rejects_what_is_no_matrix_product():
    x, y = te.placeholder((8, 8), name="x"), te.placeholder((8, 8), name="y")
    k = te.reduce_axis((0, 8), name="k")
    for body in (
        lambda i, j: te.max(x[i, k] * y[k, j], axis=k),
        lambda i, j: te.sum(x[i, k] + y[k, j], axis=k),
        lambda i, j: te.sum(x[i, k] * x[k, j], axis=k),
        lambda i, j: te.sum(x[i, k] * y[k, i + j - i - j], axis=k),
        lambda i, j: te.sum(x[i, k] * x[i, k], axis=k),
    ):
        sch = s_tir.Schedule(te.create_prim_func([x, y, te.compute((8, 8), body, name="c")]))
        assert match_contraction(sch, sch.get_sblock("c")) is None
