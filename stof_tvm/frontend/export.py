"""From a PyTorch module to an ExportedProgram, and from that to a functional program of operators with converters.

`decompose` leaves attention, linear, matmul, einsum, norms, activations and softmax whole; everything else becomes core
ATen operators, which also removes in-place updates and views.  Most Transformers do without it (direct.py).
"""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Mapping

import torch
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from stof_tvm.frontend.exportable.left_as_it_was import left_as_it_was
from stof_tvm.frontend.exportable.overflow_guards import OverflowGuards
from stof_tvm.frontend.exportable.quick_decompositions import quick_decompositions
from stof_tvm.frontend.exportable.transformers_cache import without_cache
from stof_tvm.frontend.exportable.transformers_experts import grouped_experts
from stof_tvm.frontend.exportable.windowed_attention import exportable_windows
from stof_tvm.frontend.exportable.without_lines import without_lines
from stof_tvm.frontend.model_lines import only_model_lines
from stof_tvm.frontend.operators.fast_paths import DECOMPOSITIONS as FAST_PATHS
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.errors import ExportError, InputError, MaskError, UnsupportedError

aten = torch.ops.aten

# Not decomposed.  PyTorch's decomposition of attention rejects the strides that transformers' GPT-2 passes ("view
# size is not compatible"); the other operators would be cut into pieces that fusion, or a pattern, must join again.
WHOLE = (
    aten.scaled_dot_product_attention.default,
    aten.linear.default,
    aten.matmul.default,
    aten.einsum.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.silu.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.logaddexp.default,
)


def _average_of_all(x, output_size):
    return x.mean(-1, keepdim=True) if list(output_size) == [1] else NotImplemented


def _largest_of_all(x, output_size):
    return x.max(-1, keepdim=True) if list(output_size) == [1] else NotImplemented


# PyTorch's own would fix the length that they go over.
POOLS = {
    aten.adaptive_avg_pool1d.default: _average_of_all,
    aten.adaptive_max_pool1d.default: _largest_of_all,
}
CACHES = (
    "\nThe model keeps tensors outside of its modules (functools.lru_cache, a global): call it once before it is "
    "built, in a new process"
)
EXPERTS = (
    "\nThe model goes through places that it finds by values (nonzero, where), as loops over experts do: compute them "
    "by grouped products (torch.nn.functional.grouped_mm of tokens sorted by expert), or all for every token"
)

NO_MASK = (
    "\nIts forward takes attention_mask, which is not among the inputs: some models make one by themselves in a way "
    "that cannot be traced, so give one, of ones where every token counts"
)


@one_at_a_time
def export_model(
    model: torch.nn.Module, args: tuple, kwargs: dict, global_tokens: torch.Tensor | None = None, dynamic_shapes=None
) -> torch.export.ExportedProgram:
    """`torch.export` of `model` in evaluation mode, without gradients, transformers' cache and loops over its experts.

    `global_tokens` is of windowed_attention.py, `dynamic_shapes` torch.export's.  The model's own modes,
    configurations and attributes are restored afterwards.
    Raises InputError for inputs that forward does not take; ExportError with torch.export's message where the model
    cannot be exported, and the model's line where it raised an error of its own; MaskError for a mask of set_mask,
    which does not hold in a traced graph.
    """
    training = [module for module in model.modules() if module.training]
    args, kwargs = distinct((args, kwargs))
    try:
        with (
            torch.no_grad(),
            _use_lazy_graph_module(True),  # torch.export writes each graph as Python up to twenty times, and runs none
            without_lines(dynamic_shapes is None),  # messages about a range of shapes have the lines
            _exportable_transformer_encoder(),
            without_cache(model, kwargs),
            grouped_experts(model),
            OverflowGuards(),
            exportable_windows(model, global_tokens),
        ):
            model.eval()
            with left_as_it_was(model):
                program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            return _with_own_paths(_without_unread_numbers(_with_readers(program)), getattr(model, "paths_within", ""))
    except (MaskError, ExportError):
        raise  # a mask of set_mask, in a graph that is traced; a buffer that the model registers
    except Exception as error:
        if isinstance(error, TypeError) and (misfit := _misfit(model, args, kwargs)):
            raise InputError(misfit) from error
        message = f"torch.export could not export {type(model).__name__}: {type(error).__name__}: {error}"
        if line := only_model_lines(error):
            message += f"\nat {line}"
        told = message
        if "not a known type" in str(error):
            message += (
                "\nA model must return tensors, in tuples, lists, dicts or types that torch.utils._pytree knows: "
                "a dataclass does after torch.export.register_dataclass(its class); "
                "for a cache of transformers, leave out use_cache=True and past_key_values"
            )
        if "fake tensor in the exported program" in str(error):
            message += CACHES
        if "data-dependent" in str(error) and "nonzero" in str(error) + str(error.__cause__):
            message += EXPERTS
        elif "data-dependent" in str(error):
            message += "\nThe model decides by a tensor's values"
        elif message == told and _leaves_out_mask(model, args, kwargs):
            message += NO_MASK
        raise ExportError(message) from error
    finally:
        for module in training:
            module.training = True


def _with_readers(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, with every node among its operands' users.

    torch.export leaves some out where a submodule's result is not used (a pooler), and removing such a node fails.
    """
    for node in program.graph.nodes:
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)
    return program


def _without_unread_numbers(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without numbers taken from tensors (`item()`) that only assertions read."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.item.default):
        readers = [node]
        for reader in readers:
            readers += [user for user in reader.users if user not in readers]
        if all(reader.users or reader.target is aten._assert_scalar.default for reader in readers[1:]):
            for reader in reversed([n for n in graph.nodes if n in set(readers)]):
                graph.erase_node(reader)
    return program


def _with_own_paths(program: torch.export.ExportedProgram, within: str) -> torch.export.ExportedProgram:
    """The program with module paths as they are in the submodule `within`, the model that a caller knows."""
    if within:
        for node in program.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                own = {key: (f"{path}.".removeprefix(f"{within}.")[:-1], kind) for key, (path, kind) in stack.items()}
                node.meta["nn_module_stack"] = own
    return program


def _misfit(model: torch.nn.Module, args: tuple, kwargs: Mapping) -> str:
    """Why a model's forward does not take the inputs, by their number or names; "" where it does."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([f"{len(args)} by position", *kwargs] if args else kwargs)
        takes = ", ".join(signature.parameters)
        return f"the example inputs ({given}) do not fit {type(model).__name__}.forward({takes}): {error}"
    return ""


def _leaves_out_mask(model: torch.nn.Module, args: tuple, kwargs: Mapping) -> bool:
    """Whether the model's forward has an attention_mask that a call leaves at its default."""
    names = list(inspect.signature(model.forward).parameters)
    return "attention_mask" in names[len(args) :] and kwargs.get("attention_mask") is None


@one_at_a_time
def decompose(program: torch.export.ExportedProgram, is_dynamic: bool = False) -> torch.export.ExportedProgram:
    """`program` in functional form with the operators of `WHOLE` kept.

    Raises UnsupportedError for dynamic shapes, unless `is_dynamic` allows them.
    """
    _refuse_expanded_writes(program)
    program = _with_whole_copies(program)
    table = torch.export.default_decompositions()
    table.update(FAST_PATHS)
    if is_dynamic:
        table.update(POOLS)
    for operator in WHOLE:
        table.pop(operator, None)
    try:
        with torch.no_grad(), _use_lazy_graph_module(True), quick_decompositions(), warnings.catch_warnings():
            # torch copies its own pytree specs in a way that it deprecates itself.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            program = program.run_decompositions(table)
    except Exception as error:
        message = f"torch.export could not decompose the program: {error}"
        if isinstance(error, AssertionError) and "compiled_fn" in str(error):
            message += f"\n{_why_aliased(program)}"
        raise ExportError(message) from error
    if not is_dynamic:
        _refuse_dynamic_shapes(program)
    return program


def example_inputs(model: torch.nn.Module, args, kwargs) -> tuple[tuple, dict]:
    """The example inputs given, else those that the model carries as `example_inputs` or `dummy_inputs`.

    These may be a tensor, a sequence (positional) or a mapping (by keyword), or a function returning one; the
    default `dummy_inputs` of a transformers model may name arguments that its forward lacks; these are left out.
    """
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args or kwargs:
        return tuple(args or ()), dict(kwargs or {})
    for name in ("example_inputs", "dummy_inputs"):
        carried = getattr(model, name, None)
        carried = carried() if callable(carried) else carried
        if isinstance(carried, torch.Tensor):
            return (carried,), {}
        if isinstance(carried, (tuple, list)) and carried:
            return tuple(carried), {}
        if isinstance(carried, Mapping) and carried:
            accepted = inspect.signature(model.forward).parameters
            return (), {key: value for key, value in carried.items() if key in accepted}
    raise InputError(
        f"{type(model).__name__} needs example inputs: pass example_inputs, or a torch.export.ExportedProgram, "
        "or give the model an attribute `example_inputs` or `dummy_inputs`"
    )


def distinct(inputs):
    """The inputs, with repeated tensors copied: torch.export would take all occurrences for one input."""
    seen = set()

    def own(tensor):
        if id(tensor) in seen:
            return tensor.clone()
        seen.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, own, inputs)


@contextlib.contextmanager
def _exportable_transformer_encoder():
    """`nn.TransformerEncoder` in a form that can be exported.

    That module compares the mask's values with a causal mask, which an export cannot.  The comparison only looks for a
    hint: the mask itself is applied all the same.
    """
    layers = torch.nn.modules.transformer
    detect = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = detect


def _why_aliased(program: torch.export.ExportedProgram) -> str:
    """Why PyTorch finds two tensors of one memory, of which the model updates one."""
    places = [x.untyped_storage().data_ptr() for x in program.state_dict.values() if x.layout is torch.strided]
    if len(set(places)) < len(places):
        return "The model updates a buffer that shares memory with another: keep one, and take views in forward"
    return (
        "The model updates a tensor that it reaches in two ways, as a buffer and through another object, such as a "
        "cache of transformers: build torch.export.export(model, args, kwargs, strict=True) instead of the model"
    )


def _with_whole_copies(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, its sources of `copy_` and `fill_` in the dtype and shape of what they are copied into.

    PyTorch takes a buffer's new value for the source itself when it decomposes a program: without its rounding, and in
    its shape.  The program given stays as it is.
    """
    if not any(map(_is_partial_copy, program.graph.nodes)):
        return program
    program = copy.copy(program)
    program._graph_module = copy.deepcopy(program.graph_module)
    graph = program.graph
    for node in filter(_is_partial_copy, list(graph.nodes)):
        old, source = node.args[:2]
        value = old.meta["val"]
        with graph.inserting_before(node):
            cast = graph.call_function(aten.to.dtype, (source, value.dtype))
            spread = graph.call_function(aten.expand.default, (cast, list(value.shape)))
            whole = graph.call_function(aten.clone.default, (spread,))
        for new in (cast, spread, whole):
            new.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.target, node.args = aten.copy_.default, (old, whole)
    program.graph_module.recompile()
    return program


def _is_partial_copy(node: torch.fx.Node) -> bool:
    """Whether a node copies a tensor into one of another dtype or shape."""
    if node.target not in (aten.copy_.default, aten.fill_.Tensor):
        return False
    old, new = (x.meta["val"] for x in node.args[:2] if isinstance(x, torch.fx.Node))
    return (old.dtype, old.shape) != (new.dtype, new.shape)


def _refuse_expanded_writes(program):
    """UnsupportedError for writes through expand().

    torch.export makes x + (new - x) of x.expand(…).add_(y), which is NaN or 0 where x is infinite or large.
    """
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default):
        views = [node]
        for view in views:
            for user in view.users:
                if not isinstance(user.target, torch._ops.OpOverload):
                    continue
                schema = user.target._schema
                if not user.args or user.args[0] is not view:
                    continue  # its result is no view of this one, nor does it write into it
                if schema.is_mutable:
                    raise UnsupportedError(
                        f"{user.target} writes into a tensor through expand(): write into the tensor itself or a view()"
                    )
                if user not in views and any(result.alias_info is not None for result in schema.returns):
                    views.append(user)


def _refuse_dynamic_shapes(program):
    user_inputs = {s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in user_inputs and isinstance(value, torch.Tensor):
            if not all(isinstance(n, int) for n in value.shape):
                shape = ", ".join(map(str, value.shape))
                raise UnsupportedError(
                    f"input {node.name!r} has the dynamic shape ({shape}), which only build takes: export with fixed "
                    "shapes"
                )
