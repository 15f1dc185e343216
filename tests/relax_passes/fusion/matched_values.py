"""What a match says that a group computes, computed by PyTorch, against the group itself on this CPU."""

import sys
from pathlib import Path

import numpy as np
import torch
import tvm
from tvm import relax

from relax_passes.fusion.matching.segment_problem import match_problem
from relax_passes.ir.rebuild import substitute
from tests.relax_passes.fusion.modules import run
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.problems import group as group_kind

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))
from row_cases import RowCase  # noqa: E402


def assert_match_computes(function: relax.Function, values: list[np.ndarray], atol=1e-5):
    """Evaluates the match's inputs, hands them to PyTorch's form of its problem, and compares the outputs in order."""
    match = match_problem(function)
    inputs = _evaluate(function, match.inputs, values)
    inputs = [
        torch.from_numpy(np.array(x)).reshape(shape).to(getattr(torch, dtype))
        for x, (shape, dtype) in zip(inputs, match.problem.inputs, strict=True)
    ]
    if isinstance(match.problem, GroupProblem):
        expected = group_kind.reference(match.problem, inputs, torch)
    else:
        expected = RowCase(match.problem, None).torch_sequence(*inputs)
    outputs = _evaluate(function, match.outputs, values)
    assert [tuple(x.shape) for x in expected] == [shape for shape, _ in match.problem.outputs]
    for actual, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(actual.reshape(wanted.shape), wanted, atol=atol)
    return match


def _evaluate(function, expressions, values) -> list[np.ndarray]:
    """Expressions over the variables of a function, for values of its parameters."""
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, p.ty) for p in function.params]
    with builder.function("main", params):
        with builder.dataflow():
            new = dict(zip(function.params, params))
            for binding in function.body.blocks[0].bindings:
                new[binding.var] = builder.emit(substitute(binding.value, new))
            results = [builder.emit(substitute(expr, new)) for expr in expressions]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    mod = relax.transform.DeadCodeElimination()(builder.finalize())
    return run(tvm.IRModule({"main": mod["main"]}), *values)
