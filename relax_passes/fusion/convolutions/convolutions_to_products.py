"""ConvolutionsToProducts: a convolution becomes one matrix product of rows that are gathered from its input.

    conv(x, w)                                         x (n, c_in, …), w (c_out, c_in, …), result (n, c_out, …)
    permute_dims(matmul(rows, permute_dims(matrix)))   rows (n, …, k), matrix (c_out, k), k = c_in · size of the kernel

A kernel template computes the product with its elementwise steps.  Its result has the channels last.  So have the
elementwise operators, slices and group norms that follow, the next convolution's rows and a transposition to channels
last, which vanishes: between them nothing is transposed back.  Any other reader takes a transposition of the result.

Preconditions: "main" is one dataflow block; before `FoldClosedExpressions`, which pads the matrix once.  A convolution
is rewritten if

- it is an nn.conv1d, nn.conv2d or nn.conv3d of one group, with the channels second; stride, padding and dilation are
  any;
- or, on a GPU, an nn.conv1d of several groups for which `groups.py` has products that pay, or one of as many groups as
  channels and results, not in float64, which is the sum of `depthwise.py`;
- its weight depends on constants, or on parameters that stand for weights, only;
- all lengths are numbers, none is 0, and for one group the rows have at most `MAX_ELEMENTS` elements, and the kernel
  has at most `MAX_PIECES` pieces along an axis;
- input, weight, bias and result have one float dtype apart from casts from half precision to float32 before the
  convolution and back after it or its bias.  These casts vanish, because products accumulate in float32 anyway.
  A convolution of half-precision values with a weight or bias that is wider stays: it would be rounded before the
  product instead of after it.

An elementwise operator follows if each of its operands has the channels last, is one number, or has one element for
each channel.  A group norm follows on a GPU: a CPU has a kernel of its own for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relax_passes.fusion.convolutions import depthwise
from relax_passes.fusion.convolutions import groups as convolution_groups
from relax_passes.fusion.convolutions.norms import emit_group_norm, is_of_channels, missing_places
from relax_passes.fusion.convolutions.rows import MAX_PIECES, Window, emit_matrix, emit_rows, padded, row_length, sliced
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, operator, permutation, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from relax_passes.ir.strided_views import slice_bounds

op = relax.op
HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float32", "float64")
MAX_ELEMENTS = 1 << 31
LAYOUTS = {"nn.conv1d": ("NCW", "OIW"), "nn.conv2d": ("NCHW", "OIHW"), "nn.conv3d": ("NCDHW", "OIDHW")}
ELEMENTWISE = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "astype", "clip", "negative", "abs"),
    *("exp", "log", "sqrt", "rsqrt", "square", "tanh", "sigmoid", "erf"),
    *("nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu"),
}


@tvm.transform.module_pass(opt_level=0, name="ConvolutionsToProducts")
class ConvolutionsToProducts:
    """Rewrite the convolutions of "main" with constant weights, for a GPU also those of several groups."""

    def __init__(self, is_cuda: bool = False):
        self.is_cuda = is_cuda

    def transform_module(self, mod, _ctx):
        rewriter = _Rewriter(Bindings(mod["main"]), self.is_cuda)
        return rebuild(mod, rewriter.replace) if rewriter.found else mod


@dataclass(frozen=True)
class _Convolution:
    """A convolution of `x`, with the bias that is added before the cast back, if there is such a cast."""

    x: relax.Expr
    weight: relax.Expr
    windows: list[Window]
    groups: int
    bias: relax.Expr | None = None


class _Rewriter:
    """Binds variables (n, c, …) to transpositions of their twins, which hold the same values as (n, places, c)."""

    def __init__(self, bindings: Bindings, is_cuda: bool):
        self.bindings = bindings
        self.is_cuda = is_cuda
        self.closed = ClosedExpressions(bindings, bindings.weights)
        matches = ((var, self._match(var)) for var in bindings.values)
        self.found = {var: match for var, match in matches if match is not None}
        self.twins = {}  # variable of the old function -> its twin, a variable of the new one
        self.wholes = {}  # variable of the old function -> its twin with the places that a norm's sums need

    def replace(self, builder, var, new):
        twin = self._twin(builder.emit, var, new)
        if twin is not None:
            self.twins[var] = builder.emit(twin, f"{var.name}_last")
            return op.permute_dims(self._channels_last(builder.emit, var, new), _to_second(len(shape_of(var))))
        call = self.bindings.call(var, "permute_dims")
        if call is not None and call.args[0] in self.twins:
            to_second = _to_second(len(shape_of(var)))
            axes = [to_second[a] for a in permutation(call)]
            last = self._channels_last(builder.emit, call.args[0], new)
            return last if axes == sorted(axes) else op.permute_dims(last, axes)
        return None

    # -- matching --------------------------------------------------------------------------------------------------

    def _match(self, var) -> _Convolution | None:
        """The convolution, or the cast back of one, that `var` is bound to, if it is to be rewritten."""
        if static_shape(var) is None or dtype_of(var) not in FLOATS:
            return None
        dtype, whole, bias = dtype_of(var), self._before_cast(var, "float32", HALF), None
        if whole is not var and (added := self._only_reader(whole, "add")) is not None:
            whole, bias = added.args
        conv = self.bindings.call(var, *LAYOUTS) if whole is var else self._only_reader(whole, *LAYOUTS)
        if conv is None or not self.closed.is_closed(conv.args[1]) or (windows := self._windows(conv)) is None:
            return None
        x, weight = conv.args
        if whole is not var:
            x, weight = (self._before_cast(operand, dtype, ["float32"]) for operand in conv.args)
        elif any(self._before_cast(x, half, ["float32"]) is not x for half in HALF):
            return None
        if bias is not None:
            if not _is_per_channel(static_shape(bias), len(shape_of(conv))):
                return None
            shaped = self.bindings.call(bias, *SAME_ELEMENTS)
            bias = self._before_cast(bias if shaped is None else shaped.args[0], dtype, ["float32"])
        if any(dtype_of(expr) != dtype for expr in (x, weight, *([] if bias is None else [bias]))):
            return None
        return _Convolution(x, weight, windows, int(conv.attrs.groups), bias)

    def _windows(self, conv: relax.Call) -> list[Window] | None:
        """The windows of a convolution's spatial axes; None if no products are to compute it."""
        attrs, x, weight = conv.attrs, static_shape(conv.args[0]), static_shape(conv.args[1])
        layouts = attrs.data_layout, attrs.kernel_layout
        if x is None or weight is None or layouts != LAYOUTS[operator(conv)] or attrs.out_layout != attrs.data_layout:
            return None
        steps, gaps, zeros = ([int(n) for n in numbers] for numbers in (attrs.strides, attrs.dilation, attrs.padding))
        rank = len(x) - 2
        fields = zip(x[2:], weight[2:], steps, gaps, zeros[:rank], zeros[rank:], strict=True)
        windows = [Window(*numbers) for numbers in fields]
        if 0 in (*x, *weight):
            return None
        if (groups := int(attrs.groups)) > 1:
            is_depthwise = dtype_of(conv) != "float64" and depthwise.pays(x[0], x[1], weight, windows, groups)
            pays = is_depthwise or rank == 1 and convolution_groups.pays(x[0], weight, windows[0], groups)
            return windows if self.is_cuda and pays else None
        elements = x[0] * math.prod(window.count for window in windows) * row_length(windows, x[1])
        pieces = max(len(window.pieces) for window in windows)
        return windows if pieces <= MAX_PIECES and elements <= MAX_ELEMENTS else None

    def _before_cast(self, expr, before: str, after: Sequence[str]) -> relax.Expr:
        """`expr` before a cast from dtype `before` to one of the dtypes `after`."""
        cast = self.bindings.call(expr, "astype")
        if cast is None or dtype_of(cast.args[0]) != before or dtype_of(expr) not in after:
            return expr
        return cast.args[0]

    def _only_reader(self, expr, *names):
        """The call of one of the operators that `expr` is bound to, if it is read only once."""
        is_read_once = len(self.bindings.readers[expr]) == 1 and expr not in self.bindings.outputs
        return self.bindings.call(expr, *names) if is_read_once else None

    # -- twins -----------------------------------------------------------------------------------------------------

    def _twin(self, emit, var, new) -> relax.Expr | None:
        if var in self.found:
            return self._product(emit, var, new)
        value = self.bindings.values[var]
        if not isinstance(value, relax.Call) or not any(arg in self.twins for arg in value.args):
            return None
        if operator(value) in SAME_ELEMENTS:
            keeps_channels = len(shape_of(var)) > 2 and shape_of(var)[:2] == shape_of(value.args[0])[:2]
            return self.twins[value.args[0]] if keeps_channels else None
        if operator(value) == "strided_slice":
            return self._slice(value)
        if operator(value) == "nn.group_norm":
            return self._norm(emit, value, new)
        if operator(value) not in ELEMENTWISE:
            return None
        operands = [self._operand(emit, arg, shape_of(var), new) for arg in value.args]
        return None if any(x is None for x in operands) else relax.Call(value.op, operands, value.attrs, value.ty_args)

    def _product(self, emit, var, new) -> relax.Expr:
        conv = self.found[var]
        x = self._channels_last(emit, conv.x, new)
        bias = None if conv.bias is None else new(conv.bias)
        if bias is not None and len(shape_of(bias)) > 1:
            bias = emit(op.reshape(bias, (shape_of(var)[1],)))
        if conv.groups > 1:
            last = emit(op.permute_dims(new(conv.x), _to_last(len(shape_of(conv.x))))) if x is None else x
            weight = new(conv.weight)
            if shape_of(weight)[:2] == (conv.groups, 1):
                return depthwise.emit_depthwise(emit, last, weight, bias, conv.windows)
            return convolution_groups.emit_products(emit, last, weight, bias, conv.windows[0], conv.groups)
        is_last = x is not None
        rows = emit_rows(emit, x if is_last else new(conv.x), conv.windows, is_last, self.is_cuda)
        places = shape_of(rows)[1]
        missing = missing_places(places) if self._is_normalized(var) else 0
        rows = padded(emit, rows, [(0, 0), (0, missing), (0, 0)])
        matrix = emit_matrix(emit, new(conv.weight), conv.windows, is_last)
        product = emit(op.matmul(rows, emit(op.permute_dims(matrix, [1, 0]))))
        if bias is not None:
            product = emit(op.add(product, bias))
        if missing:
            self.wholes[var] = product
        return sliced(emit, product, 1, 0, places)

    def _is_normalized(self, var) -> bool:
        """Whether a group_norm that will read its twin reads a variable, directly or through a cast."""
        if not self.is_cuda:
            return False
        casts = [reader for reader in self.bindings.readers[var] if self.bindings.call(reader, "astype") is not None]
        readers = [reader for source in (var, *casts) for reader in self.bindings.readers[source]]
        norms = [self.bindings.call(reader, "nn.group_norm") for reader in readers]
        return any(norm is not None and is_of_channels(norm) for norm in norms)

    def _norm(self, emit, norm: relax.Call, new) -> relax.Expr | None:
        x, weight, bias = norm.args
        if not self.is_cuda or x not in self.twins or not is_of_channels(norm):
            return None
        source = x
        for half in HALF:
            source = self._before_cast(source, half, ["float32"])
        source = source if source in self.twins else x
        return emit_group_norm(emit, self.twins[source], self.wholes.get(source), norm, new(weight), new(bias))

    def _slice(self, call: relax.Call) -> relax.Expr | None:
        """A slice of a twin with as many axes."""
        bounds = slice_bounds(call)
        if bounds is None or len(shape_of(call)) != 3:
            return None
        axes = [(0, 2, 1)[axis] for axis in bounds]
        return op.strided_slice(self.twins[call.args[0]], axes, *map(list, zip(*bounds.values(), strict=True)))

    def _channels_last(self, emit, x, new) -> relax.Expr | None:
        """`x` (n, c, …) as (n, …, c): its twin, or what it is a transposition of; None if it has neither."""
        n, channels, *space = shape_of(x)
        if x in self.twins:
            twin = self.twins[x]
            return twin if len(space) == 1 else emit(op.reshape(twin, (n, *space, channels)))
        turned = self.bindings.call(x, "permute_dims")
        if turned is None or permutation(turned) != _to_second(len(shape_of(x))):
            return None
        return new(turned.args[0])

    def _operand(self, emit, expr, shape: tuple[int, ...], new) -> relax.Expr | None:
        """An operand, with the channels last, of an elementwise operator with a result of `shape`.

        None if that takes a transposition.
        """
        if not isinstance(expr.ty, relax.TensorType):
            return expr
        own = static_shape(expr)
        if expr in self.twins:
            return self.twins[expr] if own == shape else None
        if own is None or not (math.prod(own) == 1 or _is_per_channel(own, len(shape))):
            return None
        return emit(op.reshape(new(expr), (math.prod(own),))) if len(own) > 1 else new(expr)


def _is_per_channel(shape: tuple[int, ...] | None, rank: int) -> bool:
    """Whether a shape broadcasts along the second of `rank` axes only."""
    if shape is None or len(shape) not in (rank - 1, rank):
        return False
    return math.prod(shape) == shape[1 - rank]


def _to_second(rank: int) -> list[int]:
    """The axes of a permute_dims that moves the last axis to the second place."""
    return [0, rank - 1, *range(1, rank - 1)]


def _to_last(rank: int) -> list[int]:
    """The axes of a permute_dims that moves the second axis to the last place."""
    return [0, *range(2, rank), 1]
