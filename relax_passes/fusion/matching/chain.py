"""Segments that are one chain: a matrix product or an input, elementwise operators, a norm; or two products.

Leading dimensions collapse into m, whatever reshapes lie between; n is the last dimension.  Views of inputs and of
results are not part of the problem: they stay around the kernel.

All inputs and outputs have one float dtype.  Only the weights of a norm may have another, if none of them overflows in
this dtype.  Casts to it and to float32 vanish, because the kernels compute in float32; a cast to any other dtype makes
the segment no chain, since it rounds differently.  Operands have as many elements as the chain's value, or one for each
column.  A number that multiplies or divides the value must be finite, and so must the resulting factor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.tirx import FloatImm, IntImm

from relax_passes.fusion.matching.columns import columns_of
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import CI, OperatorGraph
from relax_passes.ir.bindings import dtype_of, permutation, shape_of, static_shape
from tir_kernels.errors import StofError
from tir_kernels.fusion.problem import GATE_COLUMNS, ROW_PADDING, GemmProblem, MlpProblem, Norm, RowProblem, Step

ACTIVATIONS = {
    "nn.gelu": "gelu",
    "nn.gelu_tanh": "gelu_tanh",
    "nn.relu": "relu",
    "nn.silu": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
TINY, LARGEST = (float(x) for x in (np.finfo("float32").tiny, np.finfo("float32").max))
HALF = ("float16", "bfloat16")
NORMS = {"nn.layer_norm": "layer_norm", "nn.rms_norm": "rms_norm"}


@dataclass(frozen=True)
class Gate:
    """The gate of a product: an activation, its columns and its variable; the columns of the values, once known."""

    kind: str
    gate: Sequence[int]
    var: relax.Var
    value: Sequence[int] | None = None

    @property
    def columns(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """The columns of the gate and those of the values; None until these are known."""
        return None if self.value is None else (self.gate, self.value)


class Chain:
    """Follows the one value that each operator of the chain takes from the one before."""

    def __init__(self, graph: OperatorGraph):
        self.graph = graph
        self.bindings = graph.bindings
        self.inputs = []
        self.steps = []
        self.norm: Norm | None = None
        self.norm_inputs = []
        self.casts = set()  # the dtypes of casts on the way
        self.sum = None  # the variable before the norm
        self.gemm = {}  # k and w_layout of the last product
        self.gate: Gate | None = None
        self.first: tuple | None = None  # the first of two products: m, n, steps, {k, w_layout}
        self.first_inputs = []
        self.between = []  # what the second of two products takes from the first

    def match(self) -> SegmentMatch:
        """The segment's problem and what its inputs and outputs are; NoProblem says why there is none."""
        if not self.graph.operators:
            raise NoProblem("it computes nothing at run time")
        operators = list(zip(self.graph.operators, self.graph.variables))
        if operators[0][0].kind == CI:
            self._product(operators.pop(0)[1])
        else:
            self._source(self.bindings.value(operators[0][1]))
        for operator, var in operators:
            if operator.kind == CI and self.gemm and self.first is None and self.norm is None:
                self._second_product(var)
            else:
                self._follow(operator, var)
        outputs = self._outputs()
        try:
            problem = self._problem(self._dtype(outputs), len(outputs) == 2)
        except StofError as error:
            raise NoProblem(str(error)) from None
        columns = None if self.gate is None else self.gate.columns
        return SegmentMatch(problem, (*self.first_inputs, *self.inputs, *self.norm_inputs), outputs, columns)

    def _problem(self, dtype: str, keeps_sum: bool):
        fields = self.m, self.n, dtype, tuple(self.steps), self.norm, keeps_sum
        if not self.gemm:
            return RowProblem(*fields)
        problem = GemmProblem(*fields, **self.gemm)
        if dtype == "float32" and (problem.gate or problem.batch > 1 or problem.n % ROW_PADDING):
            raise NoProblem("gates, several matrices, and columns that are no multiple of 8 are for half precision")
        if self.first is None:
            return problem
        m, n, steps, gemm = self.first
        return MlpProblem(GemmProblem(m, n, dtype, steps, **gemm), problem)

    # -- where the chain begins ------------------------------------------------------------------------------------

    def _product(self, var):
        """Begin with a matrix product."""
        a, w = self._matmul(var)
        self.inputs = [self._outside(a), w]

    def _second_product(self, var):
        """Go on with the product of the chain's value and a weight."""
        self._expect_current("matmul", self.bindings.value(var).args[0])
        inner = self.n
        self.first, self.first_inputs = (self.m, inner, tuple(self.steps), self.gemm), self.inputs
        a, w = self._matmul(var)
        if shape_of(a)[-1] != inner:
            raise NoProblem(f"the second product has rows of {shape_of(a)[-1]}, the first of {inner}")
        self.between, self.inputs, self.steps = [a], [w], []

    def _matmul(self, var) -> tuple:
        """(a, w) of a matrix times a weight from outside; their product becomes the chain's value."""
        call = self.bindings.call(var, "matmul")
        if call is None:
            raise NoProblem(f"{self.graph.operators[self.graph.index[var]].name} is no matrix product")
        a, w = call.args
        shape, w_shape = shape_of(a), shape_of(w)
        if len(w_shape) < 2 or len(shape) < 2:
            raise NoProblem(f"matmul of {shape} by {w_shape} is not a matrix times a weight")
        self.gemm = {"k": w_shape[-2], "w_layout": "kn"}
        if math.prod(w_shape[:-2]) > 1:
            self.gemm |= self._batch(shape, w_shape)
        w = self._fewest(self._along_k(w))
        self.current = var
        self.m, self.n = math.prod(shape[:-1]), w_shape[-1]
        return a, self._outside(w)

    def _batch(self, shape: tuple, w_shape: tuple) -> dict[str, int]:
        """How many matrices w holds, and how many parts of the rows are multiplied by one each, in turn."""
        outer, matrices = shape[:-2], w_shape[:-2]
        while matrices[0] == 1:
            matrices = matrices[1:]
        if outer[len(outer) - len(matrices) :] != matrices:
            raise NoProblem(f"matmul of {shape} by {w_shape} broadcasts matrices")
        return {"batch": math.prod(outer), "matrices": math.prod(matrices)}

    def _along_k(self, w):
        """w, or what it transposes, in which rows of k are contiguous: with layout "nk"."""
        transposed = self.bindings.call(w, "permute_dims")
        if transposed is None:
            return w
        axes = permutation(transposed)
        swapped = [*axes[:-2], axes[-1], axes[-2]]
        if swapped == sorted(axes):
            self.gemm["w_layout"] = "nk"
            return transposed.args[0]
        if swapped[-1] == len(axes) - 1:  # moving rows of k is faster than transposing them
            self.gemm["w_layout"] = "nk"
            return relax.BlockBuilder().normalize(relax.op.permute_dims(transposed.args[0], swapped))
        return w

    def _fewest(self, w):
        """A constant w that repeats a few matrices in turn, as over the batch, without the repetitions."""
        constant, count = self.bindings.value(w), self.gemm.get("matrices", 1)
        if count == 1 or not isinstance(constant, GenericConst):
            return w
        array = np.from_dlpack(constant.value) if dtype_of(w) in ("float16", "float32") else constant.value.numpy()
        parts = array.reshape(count, -1)
        for period in (n for n in range(1, count) if count % n == 0):
            if (parts[period:] == parts[:-period]).all():
                self.gemm |= {"matrices": period} if period > 1 else {"matrices": 1, "batch": 1}
                return relax.const(parts[:period].reshape(period, *shape_of(w)[-2:]), dtype_of(w))
        return w

    def _source(self, call):
        """Begin with the first operand from outside that is as large as the result."""
        shape = static_shape(call)
        for argument in call.args:
            if isinstance(argument, relax.Expr) and static_shape(argument) == shape and shape:
                self.inputs = [self._outside(argument)]
                self.current = argument
                self.m, self.n = math.prod(shape[:-1]), shape[-1]
                return
        raise NoProblem(f"{call.op.name.removeprefix('relax.')} has no operand of its result's shape")

    # -- what follows ----------------------------------------------------------------------------------------------

    def _follow(self, operator, var):
        call = self.bindings.value(var)
        name = operator.name
        if self._gates(name, call, var):
            return
        if self.norm is not None and name != "astype":
            raise NoProblem(f"{name} follows the norm")
        if shape_of(var)[-1:] != (self.n,) or math.prod(shape_of(var)) != self.m * self.n:
            raise NoProblem(f"{name} changes the shape from {(self.m, self.n)} to {static_shape(var)}")
        if name in ACTIVATIONS or name in ("astype", "clip"):
            self._expect_current(name, call.args[0])
            if name == "astype":
                self.casts.add(dtype_of(var))
            elif name == "clip":
                self.steps.append(Step("clip", value=self._bound(call)))
            else:
                self.steps.append(Step(ACTIVATIONS[name]))
        elif name in ("add", "multiply", "subtract", "divide"):
            self._binary(name, call)
        elif name in NORMS:
            self._normalize(name, call)
        else:
            raise NoProblem(f"{name} is none of the templates' operators")
        self.current = var

    def _gates(self, name: str, call, var) -> bool:
        """Whether an operator is a part of f(gate) * value, of two halves of a product; it is followed then."""
        if self.gate is None:
            gate = self._columns(call.args[0]) if name in ACTIVATIONS and self.gemm and self.norm is None else None
            if gate is None:
                return False
            self._check_gate()
            self.gate = Gate(ACTIVATIONS[name], gate, var)
            return True
        if self.gate.value is not None:
            return False
        others = [i for i in (0, 1) if name == "multiply" and self._is(call.args[1 - i], self.gate.var)]
        is_same_shape = others and shape_of(call.args[0]) == shape_of(call.args[1])
        value = self._columns(call.args[others[0]]) if is_same_shape else None
        n = self.n // 2
        if value is None or {*self.gate.gate, *value} != set(range(self.n)) or n % GATE_COLUMNS:
            raise NoProblem(f"{name} follows {self.gate.kind} of some columns, which multiplies no others")
        self.gate = replace(self.gate, value=value)
        bias = {"gate_bias": True} if self.steps else {}
        self.gemm |= {"gate": self.gate.kind, **bias}
        self.n, self.steps, self.current = n, [], var
        return True

    def _check_gate(self) -> None:
        """Raise NoProblem if the product cannot have a gate: it begins the segment, and only a bias follows it."""
        if self.first is not None or self.steps not in ([], [Step("add", "row")]):
            raise NoProblem("a gate follows more than a product and its bias")
        if not all(isinstance(self.bindings.value(x), GenericConst) for x in self.inputs[1:]):
            raise NoProblem("the weights of a gate and its values are not known")

    def _columns(self, expr) -> Sequence[int] | None:
        """Which columns of the chain's value, half of them, `expr` has: those of one end, every other, or others."""
        found = columns_of(self.bindings, expr, self._is_current, self.m, self.n)
        return found if found is not None and 2 * len(found) == self.n else None

    def _bound(self, call) -> float:
        """The bound of a clip that is the same on both sides of zero."""
        low, high = call.args[1:]
        if not all(isinstance(bound, FloatImm | IntImm) for bound in (low, high)) or not -low.value == high.value > 0:
            raise NoProblem(f"clip between {low} and {high}, which are not as far on both sides of zero")
        return float(high.value)

    def _binary(self, name, call):
        current = [i for i in (0, 1) if self._is_current(call.args[i])]
        if len(current) != 1 or (current == [1] and name in ("subtract", "divide")):
            raise NoProblem(f"{name} does not take the chain's value once, from the left")
        other = call.args[1 - current[0]]
        number = self.bindings.scalar(other) if name in ("multiply", "divide") else None
        if number is not None:
            self.steps.append(Step("scale", value=self._factor(name, number)))
            return
        if name not in ("add", "multiply"):
            raise NoProblem(f"{name} by a tensor")
        shape = shape_of(other)
        if math.prod(shape) == self.m * self.n:
            self.steps.append(Step(name, "matrix"))
        elif math.prod(shape) == self.n and shape[-1:] == (self.n,):
            self.steps.append(Step(name, "row"))
            if self.gemm and self.n % ROW_PADDING and not isinstance(self.bindings.value(other), GenericConst):
                raise NoProblem(
                    f"{name} of a vector of {self.n} that is not known, and is read {ROW_PADDING} at a time"
                )
        else:
            raise NoProblem(f"{name} broadcasts {shape} to {(self.m, self.n)}")
        self.inputs.append(self._outside(other))

    def _factor(self, name, number: float) -> float:
        """The factor that a product or quotient with a number applies; NoProblem unless it is 0 or a normal float32."""
        factor = number if name == "multiply" else 1.0 / number if number else math.inf
        if not math.isfinite(factor) or factor and not TINY <= abs(factor) <= LARGEST:
            raise NoProblem(f"{name} by {number}")
        return factor

    def _normalize(self, name, call):
        self._expect_current(name, call.args[0])
        axes, rank = [int(axis) for axis in call.attrs.axes], len(shape_of(call))
        if [axis % rank for axis in axes] != [rank - 1]:
            raise NoProblem(f"{name} along the dimensions {axes}")
        self.sum = self.current
        used = [True, False] if name == "nn.rms_norm" else [bool(call.attrs.scale), bool(call.attrs.center)]
        epsilon = float(call.attrs.epsilon)
        if not 0 <= epsilon <= LARGEST:
            raise NoProblem(f"{name} with eps={epsilon}")
        self.norm = Norm(NORMS[name], epsilon, *used)
        self.norm_inputs = [self._outside(argument) for argument, is_used in zip(call.args[1:], used) if is_used]

    # -- values ----------------------------------------------------------------------------------------------------

    def _is_current(self, expr) -> bool:
        """Whether `expr` is the chain's value, through reshapes."""
        return self._is(expr, self.current)

    def _is(self, expr, var) -> bool:
        """Whether `expr` is another variable, through reshapes."""
        while not expr.same_as(var):
            inner = self.bindings.same_elements(expr) if isinstance(expr, relax.Var) else None
            if inner is None:
                alias = self.bindings.values.get(expr) if isinstance(expr, relax.Var) else None
                inner = alias if isinstance(alias, relax.Var) else None
            if inner is None:
                return False
            expr = inner
        return True

    def _expect_current(self, name, expr):
        if not self._is_current(expr):
            raise NoProblem(f"{name} does not take the chain's value")

    def _outside(self, expr):
        """`expr` before a cast from half precision to float32; NoProblem unless it comes from outside the segment."""
        if any(root in self.graph.index for v in relax.analysis.free_vars(expr) for root in self.graph.roots(v)):
            raise NoProblem("an operand is computed in the segment, beside the chain")
        cast = self.bindings.call(expr, "astype")
        if cast is None or dtype_of(expr) != "float32" or dtype_of(cast.args[0]) not in HALF:
            return expr
        return cast.args[0]

    def _outputs(self) -> tuple:
        """(out,) or (out, out_sum): the segment must return the chain's last value, and may return the norm's input."""
        roots = {}
        for var in self.bindings.outputs:
            for root in self.graph.roots(var):
                roots[root] = None
        if set(roots) == {self.current}:
            return (self.current,)
        kept = [var for var in roots if not var.same_as(self.current)]
        is_sum = len(roots) == 2 and len(kept) == 1 and self.sum is not None
        if not is_sum or not self._before_casts(kept[0]).same_as(self._before_casts(self.sum)):
            names = [self.graph.operators[self.graph.index[v]].name for v in kept if v in self.graph.index]
            raise NoProblem(f"the result of {' and '.join(names) or 'a view'} is read elsewhere, too")
        return self.current, kept[0]

    def _before_casts(self, var):
        while (cast := self.bindings.call(var, "astype")) is not None:
            (var,) = self.graph.roots(cast.args[0])
        return var

    def _dtype(self, outputs) -> str:
        """The one dtype of all inputs and outputs, except the norm's weights, which are cast to it."""
        dtypes = {dtype_of(expr) for expr in (*self.first_inputs, *self.between, *self.inputs, *outputs)}
        if len(dtypes) != 1:
            raise NoProblem(f"it mixes {' and '.join(sorted(dtypes))}")
        dtype = dtypes.pop()
        self._check_casts(dtype)
        return dtype

    def _check_casts(self, dtype: str) -> None:
        """Raise NoProblem if leaving out casts changes more than roundings to `dtype`."""
        for other in sorted(self.casts - {dtype, "float32"}):
            raise NoProblem(f"astype to {other}, in a chain of {dtype}")
        for expr in self.norm_inputs:
            if dtype_of(expr) not in (dtype, *HALF) and not _stays_finite(self.bindings.value(expr), dtype):
                raise NoProblem(f"the norm's weights are {dtype_of(expr)}, in a chain of {dtype}")


def _stays_finite(weight, dtype: str) -> bool:
    """Whether a norm's float32 weight has no number that `dtype` cannot hold: bfloat16 has the same exponents."""
    if dtype == "bfloat16":
        return dtype_of(weight) == "float32"
    is_constant = isinstance(weight, GenericConst) and dtype_of(weight) == "float32"
    return is_constant and bool((np.abs(weight.value.numpy()) <= np.finfo("float16").max).all())
