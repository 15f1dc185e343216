"""Transposed scores against PyTorch's numbers in float64; what becomes attention, and what stays as it is."""

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.attention.layouts.upright_scores import UprightScores
from tests.models.running import largest_error
from tests.relax_passes.attention.near_misses import inputs
from tests.relax_passes.attention.programs import All, in_double, program_of, reasons
from tests.relax_passes.attention.transposed_programs import PROGRAMS


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.fixture(scope="module")
def expected():
    return in_double(PROGRAMS, inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, expected, index):
    assert largest_error(compiled.outputs[index], expected[index]) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_and_nothing_else(compiled, program):
    found = reasons(compiled.mod, program)
    assert (program.name in map(program_of, compiled.calls)) == (program.reason is None), found
    assert len(found) == (program.reason is not None)
    assert program.reason is None or program.reason in found[0]


@I.ir_module
class Before:
    @R.function
    def main(
        q: R.Tensor((2, 5, 8), "float32"),
        k: R.Tensor((2, 7, 8), "float32"),
        v: R.Tensor((2, 7, 4), "float32"),
        bias: R.Tensor((7, 1), "float32"),
    ) -> R.Tensor((2, 4, 5), "float32"):
        with R.dataflow():
            qt = R.permute_dims(q, [0, 2, 1])
            scores = R.matmul(k, qt)
            biased = R.add(scores, bias)
            weights = R.nn.softmax(biased, axis=1)
            vt = R.permute_dims(v, [0, 2, 1])
            out = R.matmul(vt, weights)
            R.output(out)
        return out


@I.ir_module
class Expected:
    @R.function
    def main(
        q: R.Tensor((2, 5, 8), "float32"),
        k: R.Tensor((2, 7, 8), "float32"),
        v: R.Tensor((2, 7, 4), "float32"),
        bias: R.Tensor((7, 1), "float32"),
    ) -> R.Tensor((2, 4, 5), "float32"):
        with R.dataflow():
            kt = R.permute_dims(k, [0, 2, 1])
            scores = R.matmul(q, kt)
            bias_t = R.permute_dims(bias, [1, 0])
            biased = R.add(scores, bias_t)
            weights = R.nn.softmax(biased, axis=-1)
            upright = R.matmul(weights, v)
            turned = R.permute_dims(upright, [0, 2, 1])
            out = turned
            R.output(out)
        return out


def test_expected():
    tvm.ir.assert_structural_equal(UprightScores()(Before), Expected)
    tvm.ir.assert_structural_equal(UprightScores()(Expected), Expected)
