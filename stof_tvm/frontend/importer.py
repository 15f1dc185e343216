"""TVM's importer of exported programs with our converters in front, and every result checked against PyTorch's.

For each node torch.export recorded the shape and dtype that PyTorch gives.  A result of another dtype is cast to it
(TVM 0.27 types half-precision matmuls float32, among others); one of another shape is refused.  So is an operator
that TVM imports as something else, such as a random one.
"""

import re
from functools import partial

import torch
import tvm
from tvm import relax
from tvm.ir import SourceName, Span
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from stof_tvm.frontend.attention import ATTENTION_CONVERTERS
from stof_tvm.frontend.converters import CONVERTERS
from stof_tvm.frontend.whole_operators import WHOLE_CONVERTERS
from tir_kernels.errors import StofError, UnsupportedError

# TVM 0.27 imports these as the identity, as zeros or as one fixed draw.
RANDOM = re.compile(r"(bernoulli|exponential|randn?|randn_like|rand_like|multinomial|normal|native_dropout)[_.]")
# What PyTorch accumulates in float32 for half-precision tensors, and what TVM sorts wrongly or refuses for bfloat16.
IN_FLOAT32 = re.compile(
    r"(mean|sum|var|std|prod|linalg_vector_norm|conv\w*|argmax|argmin|argsort|sort|topk|median)\."
    r"|max\.dim|pow\.(Scalar|Tensor_Tensor)"
)
HALF = ("float16", "bfloat16")
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
        span = Span(SourceName(self.site()), 0, 0, 0, 0)
        return self.emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, span))

    def site(self) -> str:
        """The path of the module that spells this node, "#1", "#2"… appended from its second site on."""
        path = module_path(self.node)
        count = self.importer.sites_of_module[path] = self.importer.sites_of_module.get(path, -1) + 1
        return f"{path}#{count}" if count else path

    @property
    def dtype(self) -> str:
        """The dtype PyTorch gives the result."""
        return self.importer._convert_data_type(self.node.meta["val"].dtype)

    @property
    def dtype_of_operands(self) -> str:
        """The dtype in which PyTorch compares the two operands, tensors or numbers."""
        operands = (x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in self.node.args[:2])
        return self.importer._convert_data_type(torch.result_type(*operands))

    @property
    def shape(self) -> list[int]:
        """The shape PyTorch gives the result."""
        return list(self.node.meta["val"].shape)


class Importer(ExportedProgramImporter):
    """`ExportedProgramImporter` with this project's converters, checks and module paths."""

    def __init__(self):
        super().__init__()
        self.sites_of_module: dict[str, int] = {}

    def create_convert_map(self):
        stock = {name: convert for name, convert in super().create_convert_map().items() if not RANDOM.match(name)}
        for name, convert in stock.items():
            if IN_FLOAT32.match(name):
                stock[name] = partial(self._in_float32, convert)
        ours = {**CONVERTERS, **WHOLE_CONVERTERS, **ATTENTION_CONVERTERS}
        table = {**stock, **{name: partial(self._with_operands, convert) for name, convert in ours.items()}}
        return {name: partial(self._checked, convert) for name, convert in table.items()}

    def _check_unsupported_func_type(self, nodes):
        missing = {}
        for node in nodes:
            if node.op == "call_function" and node.target.__name__ not in self.convert_map:
                missing.setdefault(operator_name(node), module_path(node))
        if missing:
            places = ", ".join(f"{name} (in {path or 'the root module'})" for name, path in missing.items())
            raise UnsupportedError(f"the model uses operators that have no converter: {places}")

    def _convert_pytorch_tensor_to_tvm(self, tensor_value):
        """A copy on the CPU, so that later training of the model cannot reach into the compiled one."""
        if tensor_value.layout != torch.strided:
            raise UnsupportedError(f"a parameter or buffer of layout {tensor_value.layout} is not supported")
        source = tensor_value.detach()
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu").copy_(source)
        return tvm.runtime.from_dlpack(copy)

    def _with_operands(self, convert, node):
        """Call one of our converters with the operator's arguments in its schema's order, defaults filled in."""
        schema = node.target._schema.arguments
        given = dict(zip((argument.name for argument in schema), node.args))
        given.update(node.kwargs)
        values = (given.get(argument.name, argument.default_value) for argument in schema)
        return convert(Context(self, node), *self._retrieve_args(list(values)))

    def _in_float32(self, convert, node):
        """Call one of TVM's converters with half-precision operands cast to float32; `_checked` casts back."""
        narrow = {n: self.env[n] for n in node.all_input_nodes if dtype_of(self.env[n]) in HALF}
        self.env.update((n, self.block_builder.emit(relax.op.astype(x, "float32"))) for n, x in narrow.items())
        try:
            return convert(node)
        finally:
            self.env.update(narrow)

    def _checked(self, convert, node):
        try:
            result = convert(node)
        except StofError:
            raise
        except Exception as error:
            where = module_path(node) or "the root module"
            raise UnsupportedError(f"{operator_name(node)} in {where} cannot be converted: {error}") from error
        expected = node.meta.get("val")
        if not isinstance(expected, torch.Tensor) or dtype_of(result) is None:
            return result
        shape = result.ty.shape
        if shape is None or [int(n) for n in shape] != list(expected.shape):
            raise UnsupportedError(
                f"TVM gives {operator_name(node)} in {module_path(node) or 'the root module'} the shape "
                f"{shape}, PyTorch {tuple(expected.shape)}"
            )
        dtype = self._convert_data_type(expected.dtype)
        return result if dtype_of(result) == dtype else self.block_builder.emit(relax.op.astype(result, dtype))


def dtype_of(value) -> str | None:
    """The dtype of a Relax tensor, None for anything else."""
    ty = getattr(value, "ty", None)
    return str(ty.dtype) if isinstance(ty, relax.TensorType) else None


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
