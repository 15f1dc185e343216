"""What is public says what a caller has to know.

Every module, class and function has a docstring, and in stof_tvm and relax_passes every property too.  What users
call names each of its parameters; whatever takes arguments there, or raises an error of the project itself, names the
error; whoever takes or returns arrays says their shape and dtype.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from dataclasses import dataclass

import pytest

from stof_tvm import errors

# A package stands for its `__all__`, or for all its public modules where it has none.
MODULES = (
    "stof_tvm",
    "stof_tvm.generation",
    "stof_tvm.masks",
    "stof_tvm.masks.runtime",
    "stof_tvm.parallel",
    "stof_tvm.pictures",
    "stof_tvm.transformers",
    "stof_tvm.tuning.tune",
    "stof_tvm.tuning.search.state",
    "stof_tvm.tuning.tuning_report",
    "relax_passes",
    "tir_kernels",
)
FOR_USERS = (
    "stof_tvm",
    "stof_tvm.generation",
    "stof_tvm.masks",
    "stof_tvm.masks.runtime",
    "stof_tvm.parallel",
    "stof_tvm.pictures",
    "stof_tvm.transformers",
    "stof_tvm.tuning.tune",
)
DTYPE = re.compile(r"bool|u?int\d|float|half|dtype", re.I)
PROPERTY = (property, functools.cached_property)
SHAPE = re.compile(r"\([^()]+\)")


@dataclass(frozen=True)
class Documented:
    """A module, class, function, method or property, the class that it belongs to, and where it is public."""

    module: str
    name: str
    obj: object
    owner: type | None = None

    @property
    def full_name(self) -> str:
        return ".".join(filter(None, [self.module, self.owner and self.owner.__name__, self.name]))

    @property
    def docstring(self) -> str:
        text = (vars(self.obj).get("__doc__") if inspect.isclass(self.obj) else inspect.getdoc(self.obj)) or ""
        return "" if text.startswith(f"{self.name}(") else text  # what dataclasses write is no docstring

    @property
    def is_function(self) -> bool:
        return inspect.isroutine(self.function) and not isinstance(self.obj, PROPERTY)

    @property
    def function(self):
        return self.obj.__func__ if isinstance(self.obj, (staticmethod, classmethod)) else self.obj

    @property
    def text(self) -> str:
        """The docstring, with that of the class that it belongs to."""
        return self.docstring + "\n" + ((inspect.getdoc(self.owner) or "") if self.owner else "")

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def parameters(self) -> list[str]:
        names = list(self.signature.parameters)
        return names if self.owner is None or isinstance(self.obj, staticmethod) else names[1:]


@pytest.fixture(scope="module")
def documented() -> list[Documented]:
    """Everything public, members of classes included."""
    found = []
    for module in map(importlib.import_module, names_of_modules()):
        found.append(Documented(module.__name__, "", module))
        for name in public_names(module):
            member = getattr(module, name)
            if inspect.isclass(member) or inspect.isroutine(member):
                found.append(Documented(module.__name__, name, member))
            if inspect.isclass(member):
                found += [Documented(module.__name__, *inner, member) for inner in public_members(member)]
    return found


def names_of_modules() -> list[str]:
    names = []
    for name in MODULES:
        module = importlib.import_module(name)
        names.append(name)
        if hasattr(module, "__path__") and not hasattr(module, "__all__"):
            names += [m.name for m in pkgutil.walk_packages(module.__path__, f"{name}.")]
    return sorted(set(names))


def public_names(module) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public_members(owner: type) -> list[tuple[str, object]]:
    members = vars(owner).items()
    return [
        (name, value)
        for name, value in members
        if (not name.startswith("_") or name == "__call__")
        and (isinstance(value, (*PROPERTY, staticmethod, classmethod)) or inspect.isroutine(value))
    ]


def functions(documented) -> list[Documented]:
    return [member for member in documented if member.is_function]


def errors_raised(function) -> set[str]:
    """The errors of the project that the function's own body raises."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except OSError:  # what TVM or dataclasses made
        return set()
    calls = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} & set(errors.__all__)


def test_what_is_public_is_found(documented):
    names = {member.full_name for member in documented}
    assert {"stof_tvm.build", "stof_tvm.Engine.__call__", "stof_tvm.masks.sliding_window"} <= names
    assert {"relax_passes.attention.masks.constants.fold", "tir_kernels.errors.StofError"} <= names


def test_everything_has_a_docstring(documented):
    silent = {
        member.full_name
        for member in documented
        if not member.docstring.strip()
        and not (isinstance(member.obj, PROPERTY) and member.module.startswith("tir_kernels"))
    }
    assert silent == set()


def test_what_users_call_names_its_parameters(documented):
    missing = {}
    for function in functions(documented):
        if function.module in FOR_USERS:
            unnamed = [name for name in function.parameters if not re.search(rf"\b{name}\b", function.text)]
            missing |= {function.full_name: unnamed} if unnamed else {}
    assert missing == {}


def test_what_users_call_with_arguments_says_what_it_raises(documented):
    silent = {
        function.full_name
        for function in functions(documented)
        if function.module in FOR_USERS
        and function.parameters
        and not re.search(r"\w+Error|Raises", function.docstring)
    }
    assert silent == set()


def test_errors_that_a_function_raises_are_named(documented):
    unnamed = {}
    for function in functions(documented):
        missing = {name for name in errors_raised(function.function) if name not in function.text}
        unnamed |= {function.full_name: missing} if missing else {}
    assert unnamed == {}


def test_arrays_have_a_shape_and_a_dtype(documented):
    vague = set()
    for function in functions(documented):
        annotations = [p.annotation for p in function.signature.parameters.values()]
        annotations.append(function.signature.return_annotation)
        takes_arrays = any("ndarray" in str(a) or "torch.Tensor" in str(a) for a in annotations)
        if takes_arrays and not (SHAPE.search(function.text) and DTYPE.search(function.text)):
            vague.add(function.full_name)
    assert vague == set()
