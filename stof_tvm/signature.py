"""The signature of a model: names, shapes, dtypes and the nesting of its inputs and outputs.

A program takes and returns flat lists of tensors.  A Signature turns a call of the model, positional or by keyword,
into the list of inputs, and the list of outputs into what the model would have returned, including transformers' output
objects.  It can be stored as JSON, so an engine is loaded without the model.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from stof_tvm.saving.nesting import dump_nesting, load_nesting
from stof_tvm.saving.strict_json import read_json
from tir_kernels.errors import ArtifactError, InputError, UnsupportedError

CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the flat input or output list; `dtype` as PyTorch writes it, without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Leaf:
    """One leaf of the nested inputs or outputs: tensor number `tensor` of the flat list, or the constant `value`."""

    name: str
    tensor: int | None
    value: Any = None


@dataclass(frozen=True)
class StateSpec:
    """A tensor that a call updates: input number `input`, or a buffer of the model's own where that is None.

    The program writes into the tensor itself, or brings its new value as its result number `result`, to be copied.
    Output number `output`, if there is one, is this new value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    input: int | None
    result: int | None
    output: int | None = None


@dataclass(frozen=True)
class Signature:
    """Attributes
    ----------
    inputs, outputs : tuple of TensorSpec
        The program's flat lists.  An output that the model returns twice is listed once.
    in_leaves, out_leaves : tuple of Leaf
        Leaves of (args, kwargs) and of the result, in pytree order.
    in_spec, out_spec : torch.utils._pytree.TreeSpec
        The nesting of (args, kwargs) at export, and of the result.
    names : tuple of str
        Argument names of the exported call, positional ones first.
    positional : tuple of str
        Parameters of the model's forward that may be given by position, in order.
    defaults : dict
        forward's constant defaults, by name.
    states : tuple of StateSpec
        What a call updates.  The program takes the buffers among them after its inputs.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    in_leaves: tuple[Leaf, ...]
    out_leaves: tuple[Leaf, ...]
    in_spec: Any
    out_spec: Any
    names: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    states: tuple[StateSpec, ...] = ()

    @property
    def updated(self) -> frozenset[int]:
        """Numbers of the inputs that a call updates."""
        return frozenset(state.input for state in self.states if state.input is not None)

    def flatten(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The program's inputs for the call `model(*args, **kwargs)`: contiguous; those that it updates, as given.

        Raises InputError, which names the argument, if an argument is missing or unknown, if its nesting, shape or
        dtype is not that of the export, or if a constant is not the one that the model was exported with.
        """
        return self.checked(self.arguments(args, kwargs))

    def arguments(self, args: tuple, kwargs: dict) -> list:
        """What the call `model(*args, **kwargs)` gives for each of the program's inputs, not checked.

        Raises InputError for an argument that is missing, unknown or of another nesting, and for another constant.
        """
        given = self._by_name(args, kwargs)
        example_args, example_kwargs = self.in_spec.unflatten(range(self.in_spec.num_leaves))
        ordered = [_plain(self._argument(name, given)) for name in self.names]
        call = tuple(ordered[: len(example_args)]), dict(zip(example_kwargs, ordered[len(example_args) :]))
        try:
            values = self.in_spec.flatten_up_to(call)
        except (ValueError, TypeError) as error:
            raise InputError(f"the arguments are not nested as in the export: {error}") from None
        for leaf, value in zip(self.in_leaves, values):
            if leaf.tensor is None and not _same_constant(value, leaf.value):
                raise InputError(
                    f"{leaf.name} is {_describe(value)}; the model was exported with {leaf.value!r}: for other values "
                    f"build another engine, with {leaf.name}={_short(value)} among the example inputs"
                )
        tensors = {leaf.tensor: value for leaf, value in zip(self.in_leaves, values) if leaf.tensor is not None}
        return [tensors[number] for number in range(len(self.inputs))]

    def checked(self, values: list) -> list[torch.Tensor]:
        """What `arguments` gave: contiguous, but for what a call updates, which is as given.

        Raises InputError for a value that is not of its input's shape and dtype.
        """
        tensors, updated = (
            [_checked(spec, value) for spec, value in zip(self.inputs, values, strict=True)],
            self.updated,
        )
        # A lazy negation's memory is not negated yet.
        return [x if n in updated else x.resolve_neg().contiguous() for n, x in enumerate(tensors)]

    def nest_inputs(self, tensors) -> tuple[tuple, dict]:
        """(args, kwargs) of a call, from the program's inputs: the inverse of `flatten`."""
        values = [leaf.value if leaf.tensor is None else tensors[leaf.tensor] for leaf in self.in_leaves]
        return self.in_spec.unflatten(values)

    def unflatten(self, outputs):
        """What the model returns, from the program's outputs."""
        values = [leaf.value if leaf.tensor is None else outputs[leaf.tensor] for leaf in self.out_leaves]
        return pytree.tree_unflatten(values, self.out_spec)

    def to_json(self) -> str:
        """The signature as text, for `from_json`.  ArtifactError for a type that `from_json` would refuse."""
        return json.dumps(
            {
                "inputs": [asdict(spec) for spec in self.inputs],
                "outputs": [asdict(spec) for spec in self.outputs],
                "in_leaves": [asdict(leaf) for leaf in self.in_leaves],
                "out_leaves": [asdict(leaf) for leaf in self.out_leaves],
                "in_spec": dump_nesting(self.in_spec),
                "out_spec": dump_nesting(self.out_spec),
                "names": self.names,
                "positional": self.positional,
                "defaults": self.defaults,
                "states": [asdict(state) for state in self.states],
            }
        )

    @staticmethod
    def from_json(text: str) -> "Signature":
        """Read what `to_json` wrote; ArtifactError where it is malformed or an output type is not installed here."""
        try:
            data = read_json(text)
            inputs, outputs = (
                tuple(TensorSpec(s["name"], tuple(s["shape"]), s["dtype"]) for s in data[key])
                for key in ("inputs", "outputs")
            )
            in_leaves, out_leaves = (tuple(Leaf(**leaf) for leaf in data[key]) for key in ("in_leaves", "out_leaves"))
            signature = Signature(
                inputs,
                outputs,
                in_leaves,
                out_leaves,
                in_spec=load_nesting(data["in_spec"]),
                out_spec=load_nesting(data["out_spec"]),
                names=tuple(data["names"]),
                positional=tuple(data["positional"]),
                defaults=data["defaults"],
                states=tuple(StateSpec(**{**state, "shape": tuple(state["shape"])}) for state in data["states"]),
            )
            _check(signature)
            return signature
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"the stored signature is malformed: {error}") from error

    def _by_name(self, args, kwargs) -> dict:
        if len(args) > len(self.positional):
            raise InputError(f"{len(args)} positional arguments given; the model takes {', '.join(self.positional)}")
        given = dict(zip(self.positional, args))
        for name, value in kwargs.items():
            if name in given:
                raise InputError(f"argument {name!r} is given by position and by keyword")
            given[name] = value
        for name in [name for name in given if name not in self.names]:  # as they are given
            if name in self.defaults and _same_constant(given[name], self.defaults[name]):
                continue
            known = ", ".join(self.names)
            if name not in kwargs:
                number = self.positional.index(name) + 1
                raise InputError(
                    f"positional argument {number} is {name!r}, which the example inputs did not have: give arguments "
                    f"by their names, of which there are {known}"
                )
            raise InputError(f"argument {name!r} was not part of the export, which had {known}")
        return given

    def _argument(self, name, given):
        if name in given:
            return given[name]
        if name in self.defaults:
            return self.defaults[name]
        raise InputError(f"argument {name!r} is missing; the model was exported with {', '.join(self.names)}")


def read_signature(program: torch.export.ExportedProgram, forward=None, inputs_only: bool = False) -> Signature:
    """The signature of a functional exported program; `forward` is the module's method where there is one.

    With `inputs_only` it has no outputs, and it can take calls apart only.

    Raises UnsupportedError for inputs or outputs other than tensors and plain constants, and if no output is a tensor.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    returned = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    in_args = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    out_args = [spec.arg for spec in program.graph_signature.output_specs if spec.kind in returned]
    inputs, in_leaves = _leaves(in_args, values, "input")
    outputs, out_leaves = ((), ()) if inputs_only else _leaves(out_args, values, "output")
    if not outputs and not inputs_only:
        raise UnsupportedError("the model returns no tensor")
    names = tuple(program.module_call_graph[0].signature.forward_arg_names)
    n_args = len(program.call_spec.in_spec.unflatten(range(program.call_spec.in_spec.num_leaves))[0])
    parameters = list(inspect.signature(forward).parameters.values()) if forward else []
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Signature(
        inputs,
        outputs,
        in_leaves,
        out_leaves,
        program.call_spec.in_spec,
        program.call_spec.out_spec,
        names,
        names[:n_args] + tuple(by_position[n_args:]),
        {p.name: p.default for p in parameters if isinstance(p.default, CONSTANTS)},
    )


def _leaves(arguments, values, kind) -> tuple[tuple[TensorSpec, ...], tuple[Leaf, ...]]:
    """The distinct tensors among the graph's arguments, and each argument as one of them or as a constant."""
    tensors, leaves = {}, []
    for number, argument in enumerate(arguments):
        if isinstance(argument, TensorArgument):
            value = values[argument.name]
            spec = TensorSpec(argument.name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            index = list(tensors).index(argument.name) if argument.name in tensors else len(tensors)
            tensors[argument.name] = spec
            leaves.append(Leaf(argument.name, index))
        elif isinstance(argument, ConstantArgument) and isinstance(argument.value, CONSTANTS):
            leaves.append(Leaf(argument.name or f"{kind} {number}", None, argument.value))
        else:
            raise UnsupportedError(f"{kind} {number} is {argument}; supported are tensors and plain constants")
    return tuple(tensors.values()), tuple(leaves)


def _checked(spec: TensorSpec, value) -> torch.Tensor:
    if (
        not isinstance(value, torch.Tensor)
        or tuple(value.shape) != spec.shape
        or str(value.dtype).removeprefix("torch.") != spec.dtype
    ):
        raise wrong_tensor(spec.name, spec.dtype, spec.shape, value)
    if value.layout is not torch.strided:
        raise InputError(f"{spec.name} must be a dense tensor, got one of layout {value.layout}")
    return value.detach()


def wrong_tensor(name: str, dtype: str, shape, value) -> InputError:
    """The error for an input `value` that is no tensor of this dtype and shape."""
    unpack = ": unpack it, engine(**inputs)" if isinstance(value, Mapping) else ""
    return InputError(f"{name} must be {_tensor(dtype, shape)}, got {_describe(value)}{unpack}")


def _plain(argument):
    """A mapping that PyTorch cannot take apart (a UserDict, a tokenizer's output) as a dict."""
    is_other = isinstance(argument, Mapping) and type(argument) not in pytree.SUPPORTED_NODES
    return dict(argument) if is_other else argument


def _short(value) -> str:
    return repr(value) if isinstance(value, CONSTANTS) else "…"


def _same_constant(value, constant) -> bool:
    return type(value) is type(constant) and value == constant


def _tensor(dtype: str, shape) -> str:
    return f"{'an' if dtype.startswith('i') else 'a'} {dtype} tensor of shape {shape}"


def _describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return repr(value) if isinstance(value, CONSTANTS) else f"a {type(value).__name__}"


def _check(signature: Signature) -> None:
    """ValueError unless the signature can take calls apart and put them together."""
    args, kwargs = signature.in_spec.unflatten(range(signature.in_spec.num_leaves))
    is_sound = (
        type(args) is tuple
        and type(kwargs) is dict
        and len(args) + len(kwargs) == len(signature.names) == len(set(signature.names))
        and signature.names[: len(args)] == signature.positional[: len(args)]
        and all(isinstance(name, str) for name in signature.names + signature.positional)
        and all(isinstance(value, CONSTANTS) for value in signature.defaults.values())
        and _are_sound(signature.inputs, signature.in_leaves, signature.in_spec)
        and _are_sound(signature.outputs, signature.out_leaves, signature.out_spec)
        and _are_sound_states(signature)
    )
    if not is_sound:
        raise ValueError("its parts do not fit together")


def _are_sound_states(signature: Signature) -> bool:
    """Whether states are inputs or buffers, each with its own new value."""
    results = [state.result for state in signature.states if state.result is not None]
    updated = [state.input for state in signature.states if state.input is not None]
    numbers = [*results, *updated, *(state.output for state in signature.states if state.output is not None)]
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and len(set(updated)) == len(updated)
        and all(number < len(signature.inputs) for number in updated)
        and all(
            (state.shape, state.dtype) == (signature.inputs[state.input].shape, signature.inputs[state.input].dtype)
            for state in signature.states
            if state.input is not None
        )
        and all(state.output is None or state.output < len(signature.outputs) for state in signature.states)
        and all(isinstance(state.name, str) for state in signature.states)
        and all(str(getattr(torch, state.dtype, None)) == f"torch.{state.dtype}" for state in signature.states)
        and all(type(size) is int and size >= 0 for state in signature.states for size in state.shape)
    )


def _are_sound(specs, leaves, nesting) -> bool:
    """Whether the specs describe tensors, each of these is a leaf, and the leaves fill the nesting."""
    numbers = {leaf.tensor for leaf in leaves if leaf.tensor is not None}
    return (
        all(isinstance(entry.name, str) for entry in specs + leaves)
        and all(type(size) is int and size >= 0 for spec in specs for size in spec.shape)
        and all(str(getattr(torch, spec.dtype, None)) == f"torch.{spec.dtype}" for spec in specs)
        and all(type(leaf.tensor) is int for leaf in leaves if leaf.tensor is not None)  # 0.0 equals 0 in a set
        and numbers == set(range(len(specs)))
        and all(isinstance(leaf.value, CONSTANTS) for leaf in leaves)
        and nesting.num_leaves == len(leaves)
    )
