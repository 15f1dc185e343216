"""Emit plans: the functions that compute an attention kernel's operands from positions or a block map."""

from collections.abc import Callable
from dataclasses import replace

from tvm import relax

from tir_kernels.attention.problem import Layouts
from tir_kernels.attention.select import Choice
from tir_kernels.attention.template import Plan


class PlanEmitter:
    """Emits each plan once: attentions with equal sizes, masks, positions and block maps share its results.

    `add(function, name)` adds a function to the module, `emit` an expression; `constant` makes one of an array.
    """

    def __init__(self, add: Callable, emit: Callable, constant: Callable):
        self.add, self.emit, self.constant = add, emit, constant
        self.plans: dict[tuple, Plan] = {}
        self.results: dict[tuple, list[relax.Expr]] = {}

    def operands(self, launch: Choice, given: relax.Var, target) -> list[relax.Expr]:
        """The kernel's operands after the sink, for `given` positions or a block map.

        They are computed from it, or are it and the mask's arrays.
        """
        plan = self._plan(launch, target)
        if plan is None:
            return [given, *map(self.constant, launch.operands(target).arrays)]
        key = *_key(launch), given
        if key not in self.results:
            name = "positions" if launch.problem.has_positions else "block_map"
            known = {name: given, **{name: self.constant(x) for name, x in plan.constants.items()}}
            for name, step in plan.steps.items():
                function = self.add(step.function, f"plan_{name}")
                types = [relax.TensorType(*output) for output in step.outputs.values()]
                results = self.emit(relax.call_tir(function, [known[x] for x in step.inputs], types))
                if len(types) == 1:
                    known |= dict.fromkeys(step.outputs, results)
                else:
                    known |= {x: self.emit(relax.TupleGetItem(results, i)) for i, x in enumerate(step.outputs)}
            self.results[key] = [known[name] for name in plan.operands]
        return [*self.results[key], *map(self.constant, plan.rest.arrays)]

    def _plan(self, launch: Choice, target) -> Plan | None:
        key = _key(launch)
        if key not in self.plans:
            plan = launch.template.plan(launch.problem, launch.config, target, launch.mask)
            if plan is None:
                return None
            self.plans[key] = plan
        return self.plans[key]


def _key(launch: Choice) -> tuple:
    """What a plan depends on: sizes, dtypes, the configuration and the mask."""
    problem = replace(launch.problem, scale=1.0, softcap=None, layouts=Layouts(), sink_dtype=None, gives_lse=False)
    problem = replace(problem, bias_shape=None, bias_dtype="float32")
    return launch.template.NAME, problem, launch.config, launch.mask.digest
