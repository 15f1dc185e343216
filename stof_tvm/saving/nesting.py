"""The nesting of inputs and outputs as JSON: PyTorch's TreeSpec, with types from a closed list.

PyTorch's own reader imports what the JSON names: the class of an enum, the factory of a defaultdict.  So the JSON is
checked before PyTorch reads it.  Allowed are:

- Python's containers;
- types that this process has registered with PyTorch and whose JSON PyTorch reads without calling code of theirs;
- transformers' output classes, whose modules (`transformers.modeling_outputs`,
  `transformers.models.NAME.modeling_NAME`) are the only ones that are ever imported.

A named tuple whose class is not registered with PyTorch by name is stored with the class's name and fields.  A process
that does not have the class makes one from these.
"""

import collections
import importlib
import json
import re

from torch.utils import _pytree as pytree

from stof_tvm.saving.strict_json import read_json
from tir_kernels.errors import ArtifactError

CONTAINERS = (
    *("builtins.tuple", "builtins.list", "builtins.dict"),
    *("collections.OrderedDict", "collections.namedtuple", "collections.deque"),
)
OUTPUTS = re.compile(r"(transformers\.(?:modeling_outputs|models\.\w+\.modeling_\w+))\.(\w+)", re.ASCII)
NAMED_TUPLE = "collections.namedtuple"
OUR_NAME = re.compile(r"stof_tvm:([\w.<>]+)\((\w*(?:,\w+)*)\)")
KEYS = (type(None), bool, int, float, str)


def dump_nesting(spec) -> str:
    """A TreeSpec as JSON; ArtifactError where `load_nesting` would refuse it."""
    _name_tuples(spec)
    try:
        text = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ArtifactError(f"the nesting of the model's inputs or outputs cannot be stored: {error}") from None
    load_nesting(text)
    return text


def load_nesting(text: str):
    """The TreeSpec that `treespec_dumps` wrote; ArtifactError for a type that is not allowed.

    ValueError for text that is no nesting.
    """
    try:
        protocol, root = read_json(text.encode())
        if protocol != 1:
            raise ValueError(f"protocol {protocol}")
        _check(root)
        return pytree.treespec_loads(text)
    except ArtifactError:
        raise
    except NotImplementedError as error:
        raise ArtifactError(f"an output type of the model is not registered here: {error}") from None
    except Exception as error:  # PyTorch may raise anything for text that is no nesting
        raise ValueError(f"{str(text)[:40]!r} is no nesting: {error}") from None


def _check(node: dict) -> None:
    kind, context = node["type"], node["context"]
    if kind is not None:
        if not isinstance(kind, str):
            raise ValueError(f"{kind!r} is no type")
        _check_type(kind)
    if kind == NAMED_TUPLE:
        _make_tuple(context, len(node["children_spec"]))
    elif context is not None:
        context = json.loads(context)
        is_of_dataclass = kind not in CONTAINERS and isinstance(context, list)  # two lists of names: given, left out
        for names in context if is_of_dataclass else [context]:
            _check_keys(names)
    for child in node["children_spec"]:
        _check(child)


def _name_tuples(spec) -> None:
    """Register a name with PyTorch for each class of named tuples in a TreeSpec that has none."""
    cls = spec.context
    if pytree.is_namedtuple_class(cls) and cls not in pytree.SUPPORTED_SERIALIZED_TYPES:
        name = f"stof_tvm:{cls.__module__}.{cls.__qualname__}({','.join(cls._fields)})"
        pytree._register_namedtuple(cls, serialized_type_name=name)
    for child in spec.children():
        _name_tuples(child)


def _make_tuple(name, n_fields: int) -> None:
    """Make the class that `_name_tuples` named, if this process does not know that name."""
    found = OUR_NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return
    fields = found[2].split(",") if found[2] else []
    if len(fields) != n_fields:
        raise ValueError(f"{name[:40]!r} of {n_fields} values")
    if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        # ValueError for an invalid name of a field.
        made = collections.namedtuple(found[1].rpartition(".")[2], fields)  # type: ignore[misc]
        pytree._register_namedtuple(made, serialized_type_name=name)


def _check_type(name: str) -> None:
    if name in CONTAINERS:
        return
    if output := OUTPUTS.fullmatch(name):
        _import_output(*output.groups())
        return
    registered = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    definition = None if registered is None else pytree.SUPPORTED_SERIALIZED_TYPES.get(registered)
    if definition is None:
        raise ArtifactError(f"an output type of the model is not registered here: {name[:200]}")
    if definition.from_dumpable_context is not None:
        raise ArtifactError(f"the type {name[:200]} reads code's names from files, which an engine's may not have")


def _import_output(module: str, name: str) -> None:
    """Import a class of transformers, which registers it with PyTorch."""
    try:
        base = importlib.import_module("transformers.utils").ModelOutput
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ArtifactError(f"the model returns objects of {module}, which cannot be imported: {error}") from None
    if not isinstance(found, type) or not issubclass(found, base):
        raise ArtifactError(f"the model returns objects of {module}.{name}, which is no output class of transformers")


def _check_keys(context) -> None:
    """ValueError for a context with objects, which PyTorch might take for enums: None, a number or keys are allowed."""
    values = context if isinstance(context, list) else [context]
    if not all(isinstance(value, KEYS) for value in values):
        raise ValueError(f"{str(context)[:40]} are no keys")
