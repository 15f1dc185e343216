"""Views between kernels: chains become one copy each, renamings none, and copies compute what the views are."""

import numpy as np
import torch
from tvm import relax

from relax_passes.fusion.lower_copies import LowerCopies
from relax_passes.fusion.matching.group import match_copy
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.closed_expressions import ClosedExpressions
from tests.relax_passes.fusion.modules import module_of, run
from tir_kernels.problems import group as group_kind
from tir_kernels.target import parse_target

op = relax.op
SM_90 = parse_target("cuda -arch=sm_90a")


def calls(mod) -> list[str]:
    values = [binding.value for binding in mod["main"].body.blocks[0].bindings]
    return [operator(value) for value in values if operator(value)]


def packed(body, shape=(2, 8, 96)):
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    return module_of([x], lambda builder: body(builder.emit, x))


def heads(emit, x):
    """BLOOM's: query, key and value of each head beside each other."""
    parts = emit(op.reshape(x, (2, 8, 4, 3, 8)))
    query = emit(op.squeeze(emit(op.strided_slice(parts, [3], [1], [2])), [3]))
    return emit(op.reshape(emit(op.permute_dims(query, [0, 2, 1, 3])), (8, 8, 8)))


def test_a_chain_of_views_is_one_copy():
    assert calls(LowerCopies(SM_90)(packed(heads))) == ["call_tir", "reshape"]


def test_renamings_are_no_copies():
    mod = packed(lambda emit, x: emit(op.expand_dims(emit(op.reshape(x, (16, 96))), 1)))
    assert calls(LowerCopies(SM_90)(mod)) == ["reshape", "expand_dims"]


def test_views_that_the_kernel_does_not_compute_stay():
    def backwards(emit, x):
        return emit(op.strided_slice(x, [1], [-1], [-9], [-1]))

    assert "strided_slice" in calls(LowerCopies(SM_90)(packed(backwards)))


def parts(emit, x):
    found = emit(op.split(x, 3, axis=-1))
    return relax.Tuple([emit(relax.TupleGetItem(found, i)) for i in range(3)])


def test_small_copies_share_a_call():
    assert calls(LowerCopies(SM_90)(packed(parts))) == ["call_tir"]


def test_large_copies_have_calls_of_their_own():
    assert calls(LowerCopies(SM_90)(packed(parts, (128, 64, 96)))) == ["call_tir"] * 3


def test_a_copy_of_what_comes_later_has_a_call_of_its_own():
    """The second one reads what is computed from the first one."""

    def chain(emit, x):
        first = emit(op.permute_dims(x, [0, 2, 1]))
        return relax.Tuple([first, emit(op.permute_dims(emit(op.nn.relu(first)), [0, 2, 1]))])

    assert calls(LowerCopies(SM_90)(packed(chain))) == ["call_tir", "nn.relu", "call_tir"]


def test_a_copy_has_the_elements_of_the_views():
    def rolled(emit, x):
        places = relax.const((np.arange(8) + 3) % 8)
        wide = emit(op.concat([emit(op.take(x, places, axis=1)), x], axis=2))
        return emit(op.permute_dims(wide, [2, 0, 1]))

    for body in (heads, rolled):
        mod = packed(body)
        bindings = Bindings(mod["main"])
        (output,) = bindings.outputs
        match = match_copy(bindings, ClosedExpressions(bindings).closed_vars, [output])
        x = torch.randn(2, 8, 96)
        (found,) = group_kind.reference(match.problem, [x], torch)
        (expected,) = run(mod, x.numpy())
        np.testing.assert_array_equal(found.numpy(), expected)
