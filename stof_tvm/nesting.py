"""How inputs and outputs nest, read from JSON: PyTorch's TreeSpec, of types from a closed list.

PyTorch's own reader imports what the JSON names: the class of an enum, the factory of a defaultdict.  So what it is
given is looked at first.  Allowed are Python's containers, types that this process has registered with PyTorch and
whose JSON PyTorch reads without code of theirs, and transformers' output classes, whose modules
(`transformers.modeling_outputs`, `transformers.models.NAME.modeling_NAME`) are the only ones that are ever imported.
"""

import importlib
import json
import re

from torch.utils import _pytree as pytree

from stof_tvm.strict_json import read_json
from tir_kernels.errors import ArtifactError

CONTAINERS = (
    *("builtins.tuple", "builtins.list", "builtins.dict"),
    *("collections.OrderedDict", "collections.namedtuple", "collections.deque"),
)
OUTPUTS = re.compile(r"(transformers\.(?:modeling_outputs|models\.\w+\.modeling_\w+))\.(\w+)", re.ASCII)
KEYS = (type(None), bool, int, float, str)


def dump_nesting(spec) -> str:
    """A TreeSpec as JSON; ArtifactError where `load_nesting` would refuse it."""
    try:
        text = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ArtifactError(f"the nesting of the model's inputs or outputs cannot be stored: {error}") from None
    load_nesting(text)
    return text


def load_nesting(text: str):
    """The TreeSpec that `treespec_dumps` wrote; ArtifactError for a type that is not allowed.

    ValueError for what is no nesting.
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
    except Exception as error:  # PyTorch raises what it likes for what is no nesting
        raise ValueError(f"{str(text)[:40]!r} is no nesting: {error}") from None


def _check(node: dict) -> None:
    kind, context = node["type"], node["context"]
    if kind is not None:
        if not isinstance(kind, str):
            raise ValueError(f"{kind!r} is no type")
        _check_type(kind)
    if kind != "collections.namedtuple" and context is not None:
        _check_keys(json.loads(context))
    for child in node["children_spec"]:
        _check(child)


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
    """ValueError for a context with objects, which PyTorch might take for enums: it has none, a number, or keys."""
    values = context if isinstance(context, list) else [context]
    if not all(isinstance(value, KEYS) for value in values):
        raise ValueError(f"{str(context)[:40]} are no keys")
