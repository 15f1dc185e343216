"""Kernel templates for LLVM that the tests lower to: plain loops, in the arguments' order of the problem."""

from dataclasses import dataclass
from types import SimpleNamespace

from tvm import te

from tir_kernels.fusion.problem import RowProblem
from tir_kernels.problems import registry
from tir_kernels.template import Operands


@dataclass(frozen=True)
class Config:
    label: str = "plain loops"


def template(name="loops", refuses=None, us=1.0, workspace=(), is_proposed=True, defers_norms=False):
    """A template of rows and products; it refuses those for which `refuses(problem)` gives a reason."""

    def unsupported(problem, target):
        if not isinstance(problem, RowProblem):
            return "no rows as they are"
        return refuses(problem) if refuses else None

    def instantiate(problem, config, target):
        extra = [te.placeholder(shape, dtype, f"ws{i}") for i, (shape, dtype) in enumerate(workspace)]
        tensors, count = registry.kind_of(problem).tensors(problem), len(problem.inputs)
        func = te.create_prim_func([*tensors[:count], *extra, *tensors[count:]])
        return func.with_attrs({"global_symbol": name, "op_pattern": 8})

    return SimpleNamespace(
        NAME=name,
        TARGET_KIND="llvm",
        IS_PROPOSED=is_proposed,
        DEFERS_NORMS=defers_norms,
        unsupported=unsupported,
        configs=lambda problem, target: [Config()],
        instantiate=instantiate,
        predict_us=lambda problem, config, target: us(problem) if callable(us) else us,
        operands=lambda problem, config, target: Operands(workspace=tuple(workspace)),
    )
