"""Complex tensors inside a model, such as rotary factors: as pairs of real ones.

Parameters and buffers become real ones whose last dimension holds the two parts.  Inputs and outputs are refused, and
so is an operator on complex tensors that has no converter here.
"""

from dataclasses import dataclass

import torch
from torch.export.graph_signature import InputKind, OutputKind
from tvm import relax

from stof_tvm.frontend.operators.converters import cast, concat, constant
from tir_kernels.errors import UnsupportedError

op = relax.op
aten = torch.ops.aten

# Operators that only move elements: their converters run once on the real and once on the imaginary parts.
PARTWISE = (
    *("view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "clone.default", "contiguous.default"),
    *("detach.default", "alias.default", "lift_fresh_copy.default", "unsqueeze.default", "squeeze.default"),
    *("squeeze.dim", "squeeze.dims", "expand.default", "permute.default", "transpose.int", "t.default", "mT.default"),
    *("slice.Tensor", "select.int", "narrow.default", "index.Tensor", "index_select.default", "embedding.default"),
    *("cat.default", "stack.default", "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int"),
    *("repeat.default", "flip.default", "roll.default"),
)


@dataclass(frozen=True)
class Complex:
    """The Relax expressions of the two parts, of one shape and dtype."""

    real: relax.Expr
    imaginary: relax.Expr


def make_constants_real(program: torch.export.ExportedProgram) -> None:
    """Change a program to hold its complex parameters, buffers and constants as `torch.view_as_real` gives them.

    UnsupportedError for complex inputs and outputs.
    """
    specs = program.graph_signature
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in specs.output_specs:
        value = next((a.meta.get("val") for a in _outputs(program) if a.name == getattr(spec.arg, "name", None)), None)
        if _is_complex(value) and spec.kind is OutputKind.USER_OUTPUT:
            raise UnsupportedError(f"output {spec.arg.name!r} is complex; return torch.view_as_real of it")
    found = [spec for spec in specs.input_specs if _is_complex(nodes[spec.arg.name].meta.get("val"))]
    if not found:
        return
    # The dictionaries may be another program's, too.
    program._state_dict, program._constants = dict(program._state_dict), dict(program._constants)
    for spec in found:
        if spec.kind is InputKind.USER_INPUT:
            raise UnsupportedError(f"input {spec.arg.name!r} is complex; give torch.view_as_real of it")
        store = program._state_dict if spec.target in program._state_dict else program._constants
        node, value = nodes[spec.arg.name], store[spec.target]
        assert isinstance(value, torch.Tensor)
        parts = torch.view_as_real(value.detach().resolve_conj()).contiguous()
        store[spec.target] = torch.nn.Parameter(parts, False) if spec.kind is InputKind.PARAMETER else parts
        fake = node.meta["val"]
        with program.graph.inserting_after(node):
            whole = program.graph.call_function(aten.view_as_complex.default, (node,))
        whole.meta.update(val=fake)
        node.meta["val"] = fake.new_empty(parts.shape, dtype=parts.dtype)
        node.meta.pop("tensor_meta", None)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)


def is_complex(node) -> bool:
    """Whether a node takes or gives a complex tensor."""
    return any(_is_complex(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def convert_complex(context, convert, name):
    """The result of a node with complex operands; `convert(node)` is the operator's converter for real ones."""
    node, env = context.node, context.importer.env
    if name not in COMPLEX_CONVERTERS and name not in PARTWISE:
        raise UnsupportedError(f"{node.target} on complex tensors has no converter")
    if name in COMPLEX_CONVERTERS:
        schema = node.target._schema.arguments
        given = dict(zip((argument.name for argument in schema), node.args)) | node.kwargs
        values = [given.get(argument.name, argument.default_value) for argument in schema]
        return COMPLEX_CONVERTERS[name](context, *context.importer._retrieve_args(values))
    whole = {n: env[n] for n in node.all_input_nodes if isinstance(env[n], Complex)}
    results = []
    try:
        for part in ("real", "imaginary"):
            env.update((n, getattr(value, part)) for n, value in whole.items())
            results.append(convert(node))
    finally:
        env.update(whole)
    if isinstance(node.meta["val"], torch.Tensor):
        return Complex(*results)
    parts = [[context.emit(relax.TupleGetItem(r, n)) for n in range(len(node.meta["val"]))] for r in results]
    return tuple(Complex(*pair) for pair in zip(*parts))


# -- converters --------------------------------------------------------------------------------------------------------


def view_as_complex(context, x):
    axis = len(x.ty.shape) - 1
    part = lambda n: context.emit(op.take(x, relax.const(n, "int64"), axis=axis, mode="clip"))
    return Complex(part(0), part(1))


def view_as_real(context, z):
    axis = len(z.real.ty.shape)
    return concat(context, [context.emit(op.expand_dims(part, axis)) for part in (z.real, z.imaginary)], axis)


def polar(context, length, angle):
    product = lambda f: context.emit(op.multiply(length, context.emit(f(angle))))
    return Complex(product(op.cos), product(op.sin))


def exponential(context, z):
    return polar(context, context.emit(op.exp(z.real)), z.imaginary)


def conjugate(context, z):
    return Complex(z.real, context.emit(op.negative(z.imaginary)))


def negative(context, z):
    return Complex(*(context.emit(op.negative(part)) for part in (z.real, z.imaginary)))


def total(context, z, dim=None, keepdim=False, *_, **__):
    return Complex(*(context.emit(op.sum(part, dim or None, keepdim)) for part in (z.real, z.imaginary)))


def absolute(context, z):
    """The length, scaled by the larger part so that no square overflows."""
    a, b = (context.emit(op.abs(part)) for part in (z.real, z.imaginary))
    large, small = context.emit(op.maximum(a, b)), context.emit(op.minimum(a, b))
    none = context.emit(op.equal(large, constant(0, large)))
    ratio = context.emit(op.divide(small, context.emit(op.where(none, constant(1, large), large))))
    square = context.emit(op.add(context.emit(op.multiply(ratio, ratio)), constant(1, ratio)))
    return context.emit(op.multiply(large, context.emit(op.sqrt(square))))


def multiply(context, x, y):
    x, y = (_operand(context, value) for value in (x, y))
    if not isinstance(x, Complex):
        x, y = y, x
    if not isinstance(y, Complex):
        return Complex(*(context.emit(op.multiply(part, y)) for part in (x.real, x.imaginary)))
    product = lambda a, b: context.emit(op.multiply(a, b))
    real = op.subtract(product(x.real, y.real), product(x.imaginary, y.imaginary))
    imaginary = op.add(product(x.real, y.imaginary), product(x.imaginary, y.real))
    return Complex(context.emit(real), context.emit(imaginary))


def divide(context, x, y):
    """Division by a real number or tensor; UnsupportedError for complex divisors: PyTorch rounds in its own way."""
    x, y = (_operand(context, value) for value in (x, y))
    if isinstance(y, Complex):
        raise UnsupportedError("a division by a complex tensor has no converter")
    return Complex(*(context.emit(op.divide(part, y)) for part in (x.real, x.imaginary)))


def sum_of(operator):
    def convert(context, x, y, alpha=1):
        x, y = (_both_parts(context, _operand(context, value)) for value in (x, y))
        if alpha != 1:
            y = multiply(context, y, alpha)
        emit = lambda a, b: context.emit(operator(a, b))
        return Complex(emit(x.real, y.real), emit(x.imaginary, y.imaginary))

    return convert


def same(_context, z, *_):
    return z


def to_copy(context, x, dtype=None, *_, **__):
    x = _both_parts(context, _operand(context, x))
    if not _is_complex(context.node.meta["val"]):
        raise UnsupportedError("a cast of a complex tensor to a real dtype drops the imaginary part; take .real")
    return Complex(*(cast(context, part, _part_dtype(context)) for part in (x.real, x.imaginary)))


def _operand(context, x):
    """A tensor or number as a Complex or a real expression, in the dtype of the result's parts."""
    dtype = _part_dtype(context)
    if isinstance(x, Complex):
        return Complex(cast(context, x.real, dtype), cast(context, x.imaginary, dtype))
    if isinstance(x, complex):
        return Complex(relax.const(x.real, dtype), relax.const(x.imag, dtype))
    return cast(context, x, dtype) if isinstance(x, relax.Expr) else relax.const(x, dtype)


def _both_parts(context, x):
    return x if isinstance(x, Complex) else Complex(x, context.emit(op.zeros_like(x)))


def _part_dtype(context) -> str:
    return str(context.node.meta["val"].dtype.to_real()).removeprefix("torch.")


def _is_complex(value) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(x, torch.Tensor) and x.is_complex() for x in values)


def _outputs(program):
    return [x for x in program.graph.output_node().args[0] if isinstance(x, torch.fx.Node)]


COMPLEX_CONVERTERS = {
    "view_as_complex.default": view_as_complex,
    "view_as_real.default": view_as_real,
    "real.default": lambda _, z: z.real,
    "imag.default": lambda _, z: z.imaginary,
    "complex.default": lambda _, real, imaginary: Complex(real, imaginary),
    "polar.default": polar,
    "exp.default": exponential,
    "abs.default": absolute,
    "_conj.default": conjugate,
    "conj_physical.default": conjugate,
    "resolve_conj.default": same,
    "resolve_neg.default": same,
    "_assert_tensor_metadata.default": lambda *_: None,  # the importer compares every result with what was recorded
    "neg.default": negative,
    "sum.dim_IntList": total,
    "mul.Tensor": multiply,
    "mul.Scalar": multiply,
    "div.Tensor": divide,
    "div.Scalar": divide,
    "add.Tensor": sum_of(op.add),
    "sub.Tensor": sum_of(op.subtract),
    "_to_copy.default": to_copy,
    "to.dtype": to_copy,
    "to.dtype_layout": to_copy,
}
