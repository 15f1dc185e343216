"""UprightScores: scores that a model computes as keys by queries become queries by keys, as the matchers expect.

    softmax(k qᵀ, axis=-2)ᵀ v        (vᵀ softmax(k qᵀ, axis=-2))ᵀ        softmax((k qᵀ)ᵀ, axis=-1) v

The pass follows a product through element-by-element operators, and through softmaxes and reductions over its rows, up
to transposes, or to products that have the followed value as their right operand.  All of these are replaced by their
transposes: (a b)ᵀ is bᵀ aᵀ, and every other operand is transposed.  A product of vᵀ with transposed weights on its
right is replaced in the same way.  If anything else reads one of the replaced values, nothing is changed.  So the
rewrite is right for any program.

Preconditions: as for `CanonicalizeAttention`, which follows.
"""

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.composite import is_attention
from relax_passes.attention.spellings.steps import is_product_of_states
from relax_passes.ir.bindings import Bindings, element_count, operator, permutation, shape_of, static_shape
from relax_passes.ir.open_blocks import closing_blocks

ROUNDS = 3  # scores may be transposed twice
ELEMENTWISE = (
    *("add", "subtract", "multiply", "divide", "power", "mod", "maximum", "minimum", "where", "clip", "negative"),
    *("exp", "log", "abs", "sqrt", "rsqrt", "square", "tanh", "sigmoid", "erf", "nn.relu", "astype", "isnan", "sign"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "round", "floor", "ceil", "trunc"),
    *("logical_and", "logical_or", "logical_not", "logical_xor"),
)
REDUCTIONS = ("sum", "max", "min", "mean")
SOFTMAXES = ("nn.softmax", "nn.log_softmax")
WIDENING = ("concat", "nn.pad", "strided_slice")  # these put columns or rows beside the scores, or drop them again

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="UprightScores")
class UprightScores:
    """Transpose scores that are keys by queries, and the values that are computed from them."""

    def transform_module(self, mod, _ctx):
        mod = relax.transform.DeadCodeElimination()(mod)
        for _ in range(ROUNDS):
            for global_var, function in mod.functions_items():
                if isinstance(function, relax.Function) and not is_attention(function):
                    regions = _find_regions(Bindings(function))
                    if regions.flipped:
                        mod = _Transposer(mod, regions).transform(global_var, function)
                        break
            else:
                break
        return relax.transform.DeadCodeElimination()(mod)


class _Regions:
    """The variables of one function that are to be transposed.

    flipped : variables to be bound to their transposes instead
    turned : variables bound to a transpose of a flipped variable -> that flipped variable
    reduced : variables of reductions over the rows without keepdims, whose values a transpose does not change
    is_certain : whether something shows that the scores are transposed
    """

    def __init__(self):
        self.flipped: dict[relax.Var, None] = {}
        self.turned: dict[relax.Var, relax.Var] = {}
        self.reduced: set[relax.Var] = set()
        self.is_certain = False

    def add(self, other: "_Regions"):
        self.flipped |= other.flipped
        self.turned |= other.turned
        self.reduced |= other.reduced


def _find_regions(bindings: Bindings) -> _Regions:
    found = _Regions()
    for var, value in bindings.values.items():
        region = None
        if operator(value) == "matmul" and _is_product(bindings, value) and _leads_to_weights(bindings, var):
            region = _walk(bindings, var)
        elif _is_swap(value) and _are_weights(bindings, value.args[0]):
            region = _products_of(bindings, var)
        if region is not None and not {*region.flipped} & {*found.flipped}:
            found.add(region)
    return found


def _is_product(bindings, call) -> bool:
    """Whether this is q·kᵀ or k·qᵀ, heads of k shared or not."""
    a, b = (static_shape(x) for x in call.args)
    if a is None or b is None or len(a) != len(b):
        return False
    return is_product_of_states(bindings, call) or len(a) > 2 and shape_of(call)[:-2] == b[:-2]


def _walk(bindings, start) -> _Regions | None:
    """The region that begins with a product.

    None if a reader in it cannot be transposed, or if nothing shows that the scores are transposed.
    """
    region, pending = _Regions(), [start]
    region.flipped[start] = None
    while pending:
        var = pending.pop()
        if var in bindings.outputs:
            return None
        for reader in dict.fromkeys(bindings.readers[var]):
            call = bindings.value(reader)
            if reader in region.flipped:
                continue
            if isinstance(bindings.values[reader], relax.Var):  # an alias
                return None
            if _is_swap(call):
                region.turned[reader] = var
                region.is_certain = True
            elif operator(call) == "matmul" and call.args[1].same_as(var) and not call.args[0].same_as(var):
                if shape_of(call)[:-2] != shape_of(var)[:-2] or len(shape_of(call.args[0])) != len(shape_of(var)):
                    return None
                region.flipped[reader] = None  # its readers may be anything: they get the new product transposed back
                region.turned |= {x: reader for x in bindings.readers[reader] if _is_swap(bindings.value(x))}
            elif _is_over_rows(call):
                region.is_certain = True
                if operator(call) in REDUCTIONS and not bool(call.attrs.keepdims):
                    region.reduced.add(reader)
                else:
                    region.flipped[reader] = None
                    pending.append(reader)
            elif _keeps_last_two(bindings, call, var) or _widens(bindings, call):
                region.flipped[reader] = None
                pending.append(reader)
            else:
                return None
    return region if region.is_certain else None


def _products_of(bindings, swapped) -> _Regions | None:
    """The region of products whose right operand is transposed weights; None if anything else reads these."""
    region = _Regions()
    for reader in dict.fromkeys(bindings.readers[swapped]):
        call = bindings.value(reader)
        if operator(call) != "matmul" or not call.args[1].same_as(swapped) or call.args[0].same_as(swapped):
            return None
        if shape_of(call)[:-2] != shape_of(swapped)[:-2] or len(shape_of(call.args[0])) != len(shape_of(swapped)):
            return None
        region.flipped[reader] = None
        region.turned |= {x: reader for x in bindings.readers[reader] if _is_swap(bindings.value(x))}
    return region if swapped not in bindings.outputs else None


def _is_swap(call) -> bool:
    """Whether the call transposes the last two dimensions and no others."""
    if operator(call) != "permute_dims" or static_shape(call) is None:
        return False
    axes = permutation(call)
    return len(axes) > 1 and axes == [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]


def _is_over_rows(call) -> bool:
    """Whether a softmax or a reduction is over the second to last dimension and no other."""
    name, shape = operator(call), static_shape(call.args[0]) if operator(call) else None
    if shape is None or len(shape) < 2:
        return False
    if name in SOFTMAXES:
        return int(call.attrs.axis) % len(shape) == len(shape) - 2
    if name not in REDUCTIONS or call.attrs.axis is None:
        return False
    return [int(axis) % len(shape) for axis in call.attrs.axis] == [len(shape) - 2]


def _keeps_last_two(bindings, call, var) -> bool:
    """Whether the call computes element by element, or renames leading dimensions."""
    shape, before = static_shape(call), static_shape(var)
    if not operator(call) or shape is None or before is None or len(shape) < 2:
        return False
    if operator(call) in ELEMENTWISE:
        return len(shape) >= len(before) and all(static_shape(x) is not None for x in call.args)
    if operator(call) == "broadcast_to":
        return len(shape) == len(before)
    return bindings.same_elements(call) is not None and operator(call) != "permute_dims" and shape[-2:] == before[-2:]


def _widens(bindings, call) -> bool:
    """Whether the call joins tensors to the scores, pads them, or takes some of their rows or columns."""
    if operator(call) not in WIDENING or static_shape(call) is None or len(shape_of(call)) < 2:
        return False
    if operator(call) == "concat":
        parts = bindings.value(call.args[0])
        return call.attrs.axis is not None and all(
            static_shape(x) is not None for x in getattr(parts, "fields", [None])
        )
    return operator(call) == "nn.pad" or len(call.args) == 5 and isinstance(call.args[1], relax.Tuple)


def _leads_to_weights(bindings, product) -> bool:
    """Whether the product reaches a softmax or an exponential, element by element or with columns beside it."""
    pending, seen = [product], {product}
    while pending:
        var = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            if operator(call) in (*SOFTMAXES, "exp"):
                return True
            is_wider = operator(call) in ("concat", "nn.pad")
            is_alike = operator(call) not in ("", "matmul") and element_count(call) == element_count(var)
            if reader not in seen and (is_wider or is_alike):
                seen.add(reader)
                pending.append(reader)
    return False


def _are_weights(bindings, expr) -> bool:
    """Whether `expr` is a softmax over the last dimension, or an exponential, up to casts, factors and views."""
    while True:
        call = bindings.value(expr)
        name = operator(call)
        if name in SOFTMAXES or name == "exp":
            last = name == "exp" or int(call.attrs.axis) in (-1, len(shape_of(call)) - 1)
            return static_shape(call) is not None and last
        if name not in ("astype", "divide", "multiply", "reshape", "strided_slice"):
            return False
        expr = call.args[0]


@mutator
class _Transposer(PyExprMutator):
    def __init__(self, mod, regions: _Regions):
        super().__init__(mod)
        self.regions = regions
        self.upright = {}  # flipped variable -> the new variable that holds its transpose
        self.bindings: Bindings

    def transform(self, global_var, function):
        self.bindings = Bindings(function)
        with closing_blocks(self.builder_):
            self.builder_.update_func(global_var, self.visit_expr(function))
        return self.builder_.get()

    def visit_var_binding_(self, binding):
        var, value = binding.var, self.bindings.value(binding.value)
        new = None
        if var in self.regions.turned and self.regions.turned[var] in self.upright:
            new = self.upright[self.regions.turned[var]]
        elif var in self.regions.flipped:
            self.upright[var] = self.builder_.emit(self._transposed(value))
            others = [x for x in self.bindings.readers[var] if x not in self.regions.turned]
            if operator(value) == "matmul" and (others or var in self.bindings.outputs):
                new = self._swapped(self.upright[var])
            elif not isinstance(var, relax.DataflowVar):
                new = self._swapped(self.upright[var])
            else:
                return
        elif var in self.regions.reduced:
            new = self.builder_.emit(_call(value, [self.upright[value.args[0]]], axis=[-1]))
        if new is None:
            super().visit_var_binding_(binding)
        else:
            if self.builder_.current_block_is_dataflow() and not isinstance(var, relax.DataflowVar):
                new = self.builder_.emit_output(new)
            self.set_var_remap(var, new)

    def _transposed(self, call) -> relax.Call:
        """A call whose result is the transpose of what `call` gives."""
        name = operator(call)
        if name == "matmul":
            a, b = call.args
            return _call(call, [self._swap(b), self._swap(a)])
        shape = (*shape_of(call)[:-2], *reversed(shape_of(call)[-2:]))
        if name == "broadcast_to":
            return op.broadcast_to(self._operand(call.args[0]), shape)
        if name in WIDENING:
            return self._widened(call, name)
        if name not in (*ELEMENTWISE, *SOFTMAXES, *REDUCTIONS):
            return op.reshape(self._operand(call.args[0]), shape)
        args = [self._operand(x) for x in call.args]
        if name in SOFTMAXES:
            return _call(call, args, axis=-1)
        return _call(call, args, axis=[-1]) if name in REDUCTIONS else _call(call, args)

    def _widened(self, call, name) -> relax.Call:
        rank = len(shape_of(call))
        turned = [*range(rank - 2), rank - 1, rank - 2]  # the dimension that takes the place of each
        if name == "concat":
            parts = [self._operand(x) for x in self.bindings.value(call.args[0]).fields]
            return op.concat(parts, turned[int(call.attrs.axis)])
        if name == "nn.pad":
            pairs = [[int(n) for n in call.attrs.pad_width][2 * axis : 2 * axis + 2] for axis in turned]
            mode, value = str(call.attrs.pad_mode), float(call.attrs.pad_value)
            return op.nn.pad(self._operand(call.args[0]), [n for pair in pairs for n in pair], mode, value)
        axes = [turned[int(axis)] for axis in call.args[1]]
        return op.strided_slice(self._operand(call.args[0]), axes, *call.args[2:], bool(call.attrs.assume_inbound))

    def _operand(self, expr):
        """The transpose of an operand, which may broadcast to the result."""
        if not isinstance(expr, relax.Expr) or static_shape(expr) is None:
            return expr
        if expr in self.upright:
            return self.upright[expr]
        shape = shape_of(expr)
        if all(n == 1 for n in shape[-2:]):
            return self.visit_expr(expr)
        if len(shape) == 1:
            return self.builder_.emit(op.reshape(self.visit_expr(expr), (*shape, 1)))
        if (call := self.bindings.call(expr, "broadcast_to")) is not None:  # kept: sinks are found through it
            swapped = (*shape[:-2], shape[-1], shape[-2])
            return self.builder_.emit(op.broadcast_to(self._operand(call.args[0]), swapped))
        return self._swap(expr)

    def _swap(self, expr):
        """`expr` with its last two dimensions swapped.

        Nothing is emitted for a flipped variable, whose transpose is known, or for a transpose, whose operand it is.
        """
        if expr in self.upright:
            return self.upright[expr]
        value = self.bindings.value(expr)
        if _is_swap(value) and value.args[0] not in self.regions.flipped:
            return self.visit_expr(value.args[0])
        return self._swapped(self.visit_expr(expr))

    def _swapped(self, expr):
        rank = len(shape_of(expr))
        return self.builder_.emit(op.permute_dims(expr, [*range(rank - 2), rank - 1, rank - 2]))


def _call(call, args, **attrs) -> relax.Call:
    """The operator of `call` with other operands and attributes, and with the span of `call`."""
    name, new = operator(call), call
    if name in SOFTMAXES:
        new = getattr(op.nn, name.removeprefix("nn."))(*args, **attrs)
    elif name in REDUCTIONS:
        new = getattr(op, name)(*args, **attrs, keepdims=bool(call.attrs.keepdims))
    return relax.Call(call.op, args, new.attrs, call.ty_args, call.span)
