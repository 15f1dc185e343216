"""TVM's importer of exported programs with our converters in front, and every result checked against PyTorch's.

For each node torch.export recorded the shape and dtype that PyTorch gives.  A result of another dtype is cast to
PyTorch's (TVM 0.27 types half-precision matmuls float32, among others); one of another shape is refused.  So is an
operator that TVM imports as something else, such as a random one.
"""

import operator
import re
from functools import partial

import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import SourceName, Span
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from relax_passes.ir.constant_arrays import ALIGNMENT
from relax_passes.ir.open_blocks import close_blocks
from stof_tvm.frontend.operators.elementwise.complex import COMPLEX_CONVERTERS, Complex, convert_complex, is_complex
from stof_tvm.frontend.operators.table import FROM_TVM, OF_LIBRARIES, OURS
from stof_tvm.frontend.pivots import may_be_attention
from tir_kernels.errors import InputError, StofError, UnsupportedError

PRODUCTS = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "einsum", "bilinear"),
    *("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "scaled_dot_product_attention",
}
NAMES_OF_LIBRARIES = {name for _, name in OF_LIBRARIES}
LEAST_MAPPED = 1 << 20  # bytes of a tensor that is not copied although it is not aligned
REMOVE = (  # what a parametrization computes from weights is a weight
    "; torch.nn.utils.parametrize.remove_parametrizations(module, name) puts the weight that a parametrization makes "
    "in its place"
)
TRANSPARENT = ("Softmax", "Dropout", "Identity")  # modules that are a step of their parent's attention


class Context:
    """What a converter gets beside its operands: the FX node, and `emit` into the function being built."""

    def __init__(self, importer, node):
        self.importer = importer
        self.node = node
        self.builder = importer.block_builder

    def emit(self, expr):
        return self.builder.emit(expr)

    def emit_at_site(self, call):
        """Emit `call` with the module path in its span, where passes find it."""
        return self.emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, _span(self.site())))

    def emit_pivot(self, call):
        """Emit a softmax or exponential: at a site of its own if it may be an attention's, else in its module."""
        return self.emit_at_site(call) if may_be_attention(self.node) else self.emit_in_module(call)

    def emit_in_module(self, call):
        """Emit `call` with the module path in its span, not as a site of its own."""
        return self.emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, _span(module_path(self.node))))

    def site(self) -> str:
        """The path of the module that spells this node, "#1", "#2"… appended from its second site on."""
        path = module_path(self.node)
        count = self.importer.sites_of_module[path] = self.importer.sites_of_module.get(path, -1) + 1
        name = f"{path}#{count}" if count else path
        self.importer.site_nodes[name] = self.node.name
        return name

    @property
    def dtype(self) -> str:
        """The dtype PyTorch gives the result, or its parts where it is complex."""
        dtype = self.node.meta["val"].dtype
        return self.importer._convert_data_type(dtype.to_real() if dtype.is_complex else dtype)

    @property
    def shape(self) -> list[int]:
        """The shape PyTorch gives the result."""
        return list(self.node.meta["val"].shape)


class Importer(ExportedProgramImporter):
    """`ExportedProgramImporter` with this project's converters, checks and module paths.

    With `shares`, constants are the program's tensors where these are dense and on the CPU, else copies.
    """

    def __init__(self, shares: bool = False):
        super().__init__()
        self.shares = shares
        self.sites_of_module: dict[str, int] = {}
        self.site_nodes: dict[str, str] = {}  # path of a site -> name of the node that spells it

    def from_exported_program(self, *arguments):
        """The module of an exported program."""
        try:
            return super().from_exported_program(*arguments)
        except BaseException:
            if self.block_builder is not None:
                close_blocks(self.block_builder)
            raise

    def create_input_vars(self, exported_program):
        """Parameters of the function, by name; UnsupportedError for a dtype that TVM does not import, as float8."""
        values = {node.name: node.meta.get("val") for node in exported_program.graph.find_nodes(op="placeholder")}
        for spec in exported_program.graph_signature.input_specs:
            value = values.get(spec.arg.name)
            if not isinstance(value, torch.Tensor):
                continue
            try:
                self._convert_data_type(value.dtype)
            except NotImplementedError as error:
                what = "input" if spec.target is None else "parameter or buffer"
                name = spec.target or spec.arg.name
                raise UnsupportedError(
                    f"{what} {name!r} has dtype {value.dtype}, which cannot be imported: give it in another"
                ) from error
        return super().create_input_vars(exported_program)

    def create_convert_map(self):
        stock = super().create_convert_map()
        table = {name: stock[name] for name in FROM_TVM}
        table.update((name, partial(self._with_operands, convert)) for name, convert in OURS.items())
        table = {**dict.fromkeys(COMPLEX_CONVERTERS), **table}
        return {name: partial(self._checked, name, convert) for name, convert in table.items()}

    def _check_unsupported_func_type(self, nodes):
        missing = {}
        for node in nodes:
            if node.op == "call_function" and not _has_converter(node.target, self.convert_map):
                if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                    raise UnsupportedError(
                        f"the model computes with numbers that it takes from tensors, such as a length from a mask (in "
                        f"{module_path(node) or 'the root module'}): an engine's shapes and branches are fixed"
                    )
                missing.setdefault(operator_name(node), module_path(node))
        if missing:
            places = ", ".join(f"{name} (in {path or 'the root module'})" for name, path in missing.items())
            remedy = REMOVE if any("parametrizations." in (path or "") for path in missing.values()) else ""
            raise UnsupportedError(f"the model uses operators that have no converter: {places}{remedy}")

    def _convert_pytorch_tensor_to_tvm(self, tensor_value):
        """A copy on the CPU, so that later training of the model cannot reach into the compiled one.

        Or the tensor itself, if the program's tensors are shared.
        """
        if tensor_value.layout != torch.strided:
            raise UnsupportedError(f"a parameter or buffer of layout {tensor_value.layout} is not supported")
        source = tensor_value.detach()
        if self.shares and source.device.type == "cpu" and source.is_contiguous():
            if source.data_ptr() % ALIGNMENT == 0:
                return tvm.runtime.from_dlpack(source)
            if source.nbytes >= LEAST_MAPPED:  # of a mapped file; passes copy what they compute with
                return tvm_ffi.from_dlpack(source, require_alignment=1)
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu").copy_(source)
        return tvm.runtime.from_dlpack(copy)

    def _with_operands(self, convert, node):
        """Call one of our converters with the operator's arguments in its schema's order, defaults filled in."""
        schema = node.target._schema.arguments
        given = dict(zip((argument.name for argument in schema), node.args))
        given.update(node.kwargs)
        values = (given.get(argument.name, argument.default_value) for argument in schema)
        return convert(Context(self, node), *self._retrieve_args(list(values)))

    def _checked(self, name, convert, node):
        if (result := self._without_elements(node)) is not None:
            return result
        try:
            if is_complex(node) and node.target is not operator.getitem:
                result = convert_complex(Context(self, node), convert, name)
            else:
                result = convert(node)
        except Exception as error:
            if isinstance(error, StofError) and (
                operator_name(node) in str(error) or not isinstance(error, UnsupportedError)
            ):
                raise
            where = module_path(node) or "the root module"
            if mixed := _mixed_dtypes(node):
                raise InputError(
                    f"{operator_name(node)} in {where} multiplies {mixed}, which PyTorch refuses as well: convert the "
                    "model to the dtype of its inputs (model.half(), model.float()), or these (x.half(), x.float())"
                ) from error
            raise UnsupportedError(f"{operator_name(node)} in {where} cannot be converted: {error}") from error
        expected = node.meta.get("val")
        if isinstance(result, Complex):
            return Complex(*(self._as_recorded(node, part, expected.real) for part in (result.real, result.imaginary)))
        if not isinstance(expected, torch.Tensor) or dtype_of(result) is None:
            return result
        return self._as_recorded(node, result, expected)

    def _without_elements(self, node):
        """The result, by PyTorch, of an operator that reads or makes no element at all; None for other operators."""
        expected, given = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        tensors = [x for x in (expected, *given) if isinstance(x, torch.Tensor)]
        if not isinstance(expected, torch.Tensor) or expected.is_complex() or len(tensors) <= len(given):
            return None
        if any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape):  # sizes that depend on values
            return None
        if not expected.numel():
            return self.block_builder.emit(relax.op.zeros(expected.shape, self._convert_data_type(expected.dtype)))
        if not given or any(x.numel() for x in given):
            return None
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype)
        )
        return relax.const(self._convert_pytorch_tensor_to_tvm(node.target(*args, **kwargs)))

    def _as_recorded(self, node, result, expected):
        """`result` in the dtype that PyTorch gives; UnsupportedError where it has another shape."""
        shape = result.ty.shape
        if shape is None or [int(n) for n in shape] != list(expected.shape):
            raise UnsupportedError(
                f"TVM gives {operator_name(node)} in {module_path(node) or 'the root module'} the shape "
                f"{shape}, PyTorch {tuple(expected.shape)}"
            )
        dtype = self._convert_data_type(expected.dtype)
        return result if dtype_of(result) == dtype else self.block_builder.emit(relax.op.astype(result, dtype))


def _mixed_dtypes(node) -> str:
    """The operands of a product with their floating dtypes, if these differ: PyTorch's products do not promote."""
    if operator_name(node).split(".")[1] not in PRODUCTS:
        return ""
    floats = {
        x: x.meta["val"].dtype for x in node.all_input_nodes if getattr(x.meta.get("val"), "is_floating_point", bool)()
    }
    if len(set(floats.values())) < 2:
        return ""
    return " by ".join(f"{x.name} ({str(dtype).removeprefix('torch.')})" for x, dtype in floats.items())


def _span(path: str) -> Span:
    return Span(SourceName(path), 0, 0, 0, 0)


def dtype_of(value) -> str | None:
    """The dtype of a Relax tensor, None for anything else."""
    ty = getattr(value, "ty", None)
    return str(ty.dtype) if isinstance(ty, relax.TensorType) else None


def _has_converter(target, converters) -> bool:
    """Whether `target` is in the table, whose names are ATen's or a known library's: another may have its own add."""
    namespace, name = getattr(target, "namespace", "aten"), target.__name__
    is_known = (namespace == "aten" and name not in NAMES_OF_LIBRARIES) or (namespace, name) in OF_LIBRARIES
    return is_known and name in converters


def operator_name(node) -> str:
    """The schema's name of an ATen operator, as in "aten.mul.Tensor"; the function's name for others."""
    return str(node.target) if hasattr(node.target, "_schema") else node.target.__name__


def module_path(node) -> str:
    """Path, relative to the root, of the innermost module that called this node; "" for the root.

    A softmax or dropout module counts as a step of the module that owns it.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    while len(stack) > 1 and _class_name(stack[-1][1]) in TRANSPARENT:
        stack.pop()
    return re.sub(r"@\d+$", "", stack[-1][0]) if stack else ""


def _class_name(module_type) -> str:
    return str(getattr(module_type, "__qualname__", module_type)).rsplit(".", 1)[-1]
