"""Which scatters write a state in place: structure, order of readers, and what is left to be copied."""

import json
import re

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.ir.bindings import STATES, operator
from relax_passes.runtime.update_states import COPIED, UpdateStates
from relax_passes.schedule.cuda import ScheduleForCUDA
from relax_passes.schedule.cuda_rules.scatter_slices import ScatterSlices
from tests.models.quick_llvm import QUICK_LLVM as LLVM
from tir_kernels.scatter import scatter, scatter_in_place, writes_in_place
from tir_kernels.target import parse_target

ROWS, WIDTH = 6, 4
UNCHANGED = tvm.transform.module_pass(lambda mod, _: mod, opt_level=0, name="Unchanged")


def kernel(reduction="set", dtype="float32"):
    return scatter((1, ROWS, WIDTH), 2, (1, 2, 1), (1, 2, WIDTH), dtype, "int64", reduction, 0, False)


def module(body, states, outputs=0, reduction="set"):
    """A module whose "main" takes a state (6, 4), places (2,) and rows (2, 4); `body` gives its results."""
    builder = relax.BlockBuilder()
    name = builder.add_func(kernel(reduction), "scatter")
    state, at, rows = (
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape, dtype in (
            ("state", (ROWS, WIDTH), "float32"),
            ("at", (2,), "int64"),
            ("rows", (2, WIDTH), "float32"),
        )
    )

    def written(x):
        flat = builder.emit(relax.op.reshape(x, (1, ROWS, WIDTH)))
        index = builder.emit(relax.op.reshape(at, (1, 2, 1)))
        update = builder.emit(relax.op.reshape(rows, (1, 2, WIDTH)))
        new = builder.emit(relax.call_tir(name, [flat, index, update], relax.TensorType((1, ROWS, WIDTH), "float32")))
        return builder.emit(relax.op.reshape(new, (ROWS, WIDTH)))

    with builder.function("main", [state, at, rows], {STATES: json.dumps([outputs, states])}):
        fields = body(builder, state, written)
        builder.emit_func_output(builder.emit(relax.Tuple(fields)))
    return builder.get()


def values(mod):
    return [binding.value for block in mod["main"].body.blocks for binding in block.bindings]


def updated(mod):
    """(how many kernels write in place, how many do not, the results that are left, which of them are copied)."""
    after = UpdateStates(UNCHANGED)(mod)
    names = [operator(value) for value in values(after)]
    results = len(after["main"].ret_ty.fields)
    return names.count("call_tir_inplace"), names.count("call_tir"), results, json.loads(str(after.attrs[COPIED]))


def sums(builder, x):
    return builder.emit(relax.op.sum(x, [1]))


def test_results_of_other_kinds_stay_the_last_ones():
    mod = module(lambda builder, state, written: [sums(builder, state), written(state), state], [(0, 1)], outputs=1)
    after = UpdateStates(UNCHANGED)(mod)
    assert [len(x.shape) for x in after["main"].ret_ty.fields] == [
        1,
        2,
        2,
    ]  # the state is read: its new value is copied
    assert json.loads(str(after.attrs[COPIED])) == [1]


def test_a_write_is_in_place():
    mod = module(lambda _, state, written: [written(state)], [(0, 0)])
    assert updated(mod) == (1, 0, 0, [None])
    after = UpdateStates(UNCHANGED)(mod)
    (call,) = [value for value in values(after) if operator(value) == "call_tir_inplace"]
    assert [len(x.ty.shape) for x in call.args[1].fields] == [3, 3, 3]
    assert str(call.args[0].name_hint) == "scatter_in_place"
    relax.analysis.well_formed(after)


def test_readers_before_and_of_the_new_value():
    def body(builder, state, written):
        before = sums(builder, state)
        new = written(state)
        return [before, sums(builder, new), new]

    assert updated(module(body, [(0, 2)], 2)) == (1, 0, 2, [None])


def test_the_new_value_may_be_an_output():
    assert updated(module(lambda _, state, written: [written(state)], [(0, 0)], 1)) == (1, 0, 1, [None])


def test_two_writes_in_a_row():
    assert updated(module(lambda _, state, written: [written(written(state))], [(0, 0)])) == (2, 0, 0, [None])


def test_a_state_that_stays():
    assert updated(module(lambda builder, state, _: [sums(builder, state), state], [(0, 1)], 1)) == (0, 0, 1, [None])


# -- near misses -------------------------------------------------------------------------------------------------------


def test_a_later_reader_of_the_old_value():
    def body(builder, state, written):
        new = written(state)
        return [sums(builder, state), new]

    assert updated(module(body, [(0, 1)], 1)) == (0, 1, 2, [1])


def test_the_old_value_is_an_output():
    assert updated(module(lambda _, state, written: [state, written(state)], [(0, 1)], 1)) == (0, 1, 2, [1])


def test_a_value_in_between_is_an_output():
    def body(_, state, written):
        between = written(state)
        return [between, written(between)]

    assert updated(module(body, [(0, 1)], 1)) == (0, 2, 2, [1])


def test_an_update_from_the_state_itself():
    """A view of the state as the update: its rows would change while they are read."""
    builder = relax.BlockBuilder()
    every = scatter((1, ROWS, WIDTH), ROWS, (1, ROWS, 1), (1, ROWS, WIDTH), "float32", "int64", "set", 0, False)
    name = builder.add_func(every, "scatter")
    state = relax.Var("state", relax.TensorType((ROWS, WIDTH), "float32"))
    at = relax.Var("at", relax.TensorType((1, ROWS, 1), "int64"))
    with builder.function("main", [state, at], {STATES: json.dumps([0, [(0, 0)]])}):
        flat, view = (builder.emit(relax.op.reshape(state, (1, ROWS, WIDTH))) for _ in range(2))
        new = builder.emit(relax.call_tir(name, [flat, at, view], relax.TensorType((1, ROWS, WIDTH), "float32")))
        new = builder.emit(relax.op.reshape(new, (ROWS, WIDTH)))
        builder.emit_func_output(builder.emit(relax.Tuple([new])))
    assert updated(builder.get()) == (0, 1, 1, [0])


@pytest.mark.parametrize("reduction", ["add", "amax"])
def test_a_kernel_that_reads_what_it_writes(reduction):
    mod = module(lambda _, state, written: [written(state)], [(0, 0)], reduction=reduction)
    assert updated(mod) == (0, 1, 1, [0]) and not writes_in_place(kernel(reduction))


def test_a_new_value_that_no_scatter_computes():
    mod = module(lambda builder, state, _: [builder.emit(relax.op.add(state, state))], [(0, 0)])
    assert updated(mod) == (0, 0, 1, [0])


def test_a_module_without_states_is_returned_as_it_is():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            return x

    assert UpdateStates(UNCHANGED)(Module).same_as(Module)


# -- the kernel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("width", [1, 3, 6, 16, 40])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_kernel_writes_what_scatter_does(dtype, width, heads):
    torch_dtype = getattr(torch, dtype)
    x = torch.arange(heads * ROWS * width).view(heads, ROWS, width).to(torch_dtype)
    at = torch.tensor([4, 1]).view(1, 2, 1)
    rows = (100 + torch.arange(heads * 2 * width)).view(heads, 2, width).to(torch_dtype)
    out, place, at_once = torch.empty_like(x), x.clone(), x.clone()
    func = scatter((heads, ROWS, width), 2, (1, 2, 1), (heads, 2, width), dtype, "int64", "set", 0, False)
    calls = (func, (x, at, rows, out)), (scatter_in_place(func), (place, at, rows))
    for function, arguments in (*calls, (scatter_in_place(func, distinct=True), (at_once, at, rows))):
        run(function, *arguments)
    expected = x.clone()
    expected[:, at.flatten()] = rows
    assert torch.equal(out, expected) and torch.equal(place, expected) and torch.equal(at_once, expected)


@pytest.mark.parametrize("position, row", [(2, 2), (-1, ROWS - 1), (ROWS, ROWS - 1), (-ROWS - 1, 0)])
@pytest.mark.parametrize("dtype, poison", [("float32", float("nan")), ("float16", float("nan")), ("int32", -(2**31))])
def test_one_row_whose_position_is_known_at_run_time(dtype, poison, position, row):
    """Rows are copied many elements at a time; a position outside x poisons the nearest row."""
    x = torch.arange(ROWS * 16).view(1, ROWS, 16).to(getattr(torch, dtype))
    update = torch.full((1, 1, 16), 7, dtype=x.dtype)
    func = scatter(x.shape, 1, (1, 1, 1), update.shape, dtype, "int64", "set", poison, True)
    place = x.clone()
    run(scatter_in_place(func), place, torch.full((1, 1, 1), position), update)
    expected = x.clone()
    expected[0, row] = 7 if -ROWS <= position < ROWS else poison
    torch.testing.assert_close(place, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("updates, distinct", [(4, True), (4, False), (1, False)])
def test_tensors_of_more_elements_than_32_bits_count(updates, distinct):
    """They compile, with 64-bit indices."""
    n, width = 1 << 20, 1 << 12
    func = scatter((2, n, width), updates, (1, updates, 1), (2, updates, width), "float16", "int64", "set", 0, False)
    target = tvm.target.Target("nvidia/nvidia-h100")
    with target:
        for kernel_ in (func, scatter_in_place(func, distinct)):
            schedule = ScatterSlices().apply(kernel_.with_attr("global_symbol", "main"), target, False)
            tvm.compile(schedule.mod, target=target)


def run(function, *arguments):
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tvm.compile(mod, target=LLVM)["main"](*map(tvm.runtime.from_dlpack, arguments))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "bool"])
def test_rows_are_copied_16_bytes_at_a_time_on_a_gpu(dtype):
    func = scatter((8, 64, 128), 64, (1, 64, 1), (8, 64, 128), dtype, "int64", "set", 0, False)
    target = tvm.target.Target("nvidia/nvidia-h100")
    with target:
        schedule = ScatterSlices().apply(scatter_in_place(func, True).with_attr("global_symbol", "main"), target, False)
        source = tvm.compile(schedule.mod, target=target).mod.imports[0].inspect_source()
    copies = re.findall(r"\*\((\w+)\*\)\(x_ptr", source)
    assert copies == {"bool": [], "float32": ["float4"], "int8": ["int4"]}.get(dtype, ["uint4"])


@pytest.mark.parametrize(
    "positions, wraps, expected",
    [
        ([4, 1], False, True),
        ([0, 5], False, True),
        ([-1, 4], True, True),
        ([-1, 5], True, False),  # the last one twice
        ([3, 3], False, False),
        ([-1, 4], False, False),
        ([6, 4], False, False),
        ([-7, 4], True, False),
    ],
)
def test_rows_are_written_at_once_where_constants_say_that_no_two_are_the_same(positions, wraps, expected):
    func = scatter((1, ROWS, WIDTH), 2, (1, 2, 1), (1, 2, WIDTH), "float32", "int64", "set", float("nan"), wraps)
    builder = relax.BlockBuilder()
    name = builder.add_func(func, "scatter")
    state = relax.Var("state", relax.TensorType((1, ROWS, WIDTH), "float32"))
    rows = relax.Var("rows", relax.TensorType((1, 2, WIDTH), "float32"))
    with builder.function("main", [state, rows], {STATES: json.dumps([0, [[0, 0]]])}):
        index = relax.const(np.array(positions, "int64").reshape(1, 2, 1), "int64")
        new = builder.emit(relax.call_tir(name, [state, index, rows], relax.TensorType((1, ROWS, WIDTH), "float32")))
        builder.emit_func_output(builder.emit(relax.Tuple([new])))
    for target in (LLVM, "cuda -arch=sm_80"):
        schedule = ScheduleForCUDA(parse_target(target)) if target != LLVM else UNCHANGED
        mod = UpdateStates(schedule)(builder.get())
        (kernel,) = (f for name, f in mod.functions.items() if name.name_hint.endswith("_in_place"))
        loops = {"range(2)", "T.serial(2)", "unroll(2)"}
        one_after_another = any(loop in kernel.script() for loop in loops)
        assert one_after_another != expected, kernel.script()
        assert target == LLVM or "threadIdx.x" in kernel.script()


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize(
    "first, wraps, poisoned",
    [
        (0, False, []),
        (3, False, []),
        (4, False, [5]),
        (-1, False, [5]),
        (-1, True, []),
        (-7, True, [0]),
        (-7, False, [0, 1]),
        (9, False, [5]),
    ],
)
def test_rising_rows_are_written_at_once(width, first, wraps, poisoned):
    """Those outside of x are poison at its ends, whichever is written last."""
    x, at = torch.zeros(1, ROWS, width), torch.arange(first, first + 3).view(1, 3, 1)
    rows = 1 + torch.rand(1, 3, width)
    arguments = (1, ROWS, width), 3, (1, 3, 1), (1, 3, width), "float32", "int64", "set", float("nan"), wraps
    kernel_ = scatter_in_place(scatter(*arguments, is_rising=True))
    assert "range(3)" not in kernel_.script()
    expected = x.clone()
    for place, row in zip(at.flatten().tolist(), rows[0]):
        if (-ROWS if wraps else 0) <= place < ROWS:
            expected[0, place] = row
    expected[0, poisoned] = float("nan")
    run(kernel_, x, at, rows)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
