"""Problems of the kernel templates as canonical JSON, and back; tuning logs identify a workload by this text.

A dataclass or named tuple becomes an object with its class's name under "is" and its fields, without those at their
default.  So a field that a later version adds changes no text, and logs stay valid.
"""

import dataclasses
import json

from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.problems.registry import classes_by_name, problem_classes


def problem_to_json(problem) -> str:
    """The text of a problem; equal problems have equal texts."""
    return json.dumps(_encode(problem), sort_keys=True, separators=(",", ":"))


def problem_from_json(text: str):
    """The inverse of `problem_to_json`.  Raises InputError for a text that is no problem of this version."""
    try:
        problem = json.loads(text, object_hook=_decode_object)
        problem_to_json(problem)  # raises if a field holds a value that no problem has
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError, UnsupportedError) as error:
        raise InputError(f"{text[:200]!r} is no problem of the kernel templates: {str(error)[:300]}") from None
    if not isinstance(problem, problem_classes()):
        raise InputError(f"{text[:200]!r} is no problem of the kernel templates")
    return problem


def _encode(value):
    fields = _fields(value)
    if fields is not None:
        return {"is": type(value).__name__, **{name: _encode(x) for name, x in fields.items()}}
    return [_encode(x) for x in value] if isinstance(value, tuple) else value


def _fields(value) -> dict | None:
    """The fields that are not at their default."""
    if dataclasses.is_dataclass(value):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
    elif hasattr(value, "_fields"):
        defaults = {name: value._field_defaults.get(name, dataclasses.MISSING) for name in value._fields}
    else:
        return None
    found = {name: getattr(value, name) for name in defaults}
    return {name: x for name, x in found.items() if defaults[name] is dataclasses.MISSING or x != defaults[name]}


def _decode_object(data: dict):
    kind = classes_by_name()[data.pop("is")]
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in data.items()})
