"""The reference builds without a warning, and what it documents says what a caller has to know.

Every module, class and function has a docstring, and in stof_tvm and relax_passes every property too.  What users
call names each of its parameters; whatever takes arguments there, or raises an error of the project itself, names the
error; whoever takes or returns arrays says their shape and dtype.
"""

import ast
import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("pdoc", reason="pdoc is an optional dependency")
import pdoc.doc  # noqa: E402
import pdoc.extract  # noqa: E402

from stof_tvm import errors  # noqa: E402

ROOT = Path(__file__).parent.parent
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))
FOR_USERS = ("stof_tvm", "stof_tvm.masks", "stof_tvm.pictures", "stof_tvm.tuning.tune")
DTYPE = re.compile(r"bool|u?int\d|float|half|dtype", re.I)
SHAPE = re.compile(r"\([^()]+\)")


@pytest.fixture(scope="module")
def documented():
    """(module, class or None, what it documents) of everything in the reference."""
    found = []
    for name in pdoc.extract.walk_specs(list(REFERENCE["MODULES"])):
        module = pdoc.doc.Module.from_name(name)
        found.append((module, None, module))
        for member in public_members(module):
            found.append((module, None, member))
            if isinstance(member, pdoc.doc.Class):
                found += [(module, member, inner) for inner in public_members(member)]
    return found


def public_members(doc) -> list:
    public = [m for name, m in doc.members.items() if not name.startswith("_") or name == "__call__"]
    if isinstance(doc, pdoc.doc.Class):
        return [member for member in public if member.name in vars(doc.obj)]
    return [member for member in public if not isinstance(member, pdoc.doc.Module)]


def text_of(owner, member) -> str:
    """The docstring, with that of the class that it belongs to."""
    return member.docstring + "\n" + (owner.docstring if owner else "")


def functions(documented):
    return [(m, owner, f) for m, owner, f in documented if isinstance(f, pdoc.doc.Function)]


def parameters_of(owner, function) -> list[str]:
    is_static = owner is not None and isinstance(vars(owner.obj)[function.name], staticmethod)
    signature = function.signature if owner is None or is_static else function.signature_without_self
    return list(signature.parameters)


def errors_raised(function) -> set[str]:
    """The errors of the project that the function's own body raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function.obj))))
    calls = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} & set(errors.__all__)


def test_it_builds_without_a_warning(tmp_path):
    assert REFERENCE["write"](tmp_path, show_source=False) == []
    page = (tmp_path / "stof_tvm.html").read_text()
    for name in ("build", "load", "tune", "sparse_attention", "Engine", "Engine.__call__", "Report"):
        assert f'id="{name}"' in page
    assert 'id="sliding_window"' in (tmp_path / "stof_tvm" / "masks.html").read_text()
    assert (tmp_path / "tir_kernels" / "block_sparse_mask.html").exists()


def test_everything_has_a_docstring(documented):
    silent = set()
    for module, owner, member in documented:
        is_property = owner is not None and isinstance(inspect.getattr_static(owner.obj, member.name, None), property)
        needed = isinstance(member, (pdoc.doc.Module, pdoc.doc.Class, pdoc.doc.Function))
        needed |= is_property and not module.fullname.startswith("tir_kernels")
        if needed and not member.docstring.strip():
            silent.add(member.fullname)
    assert silent == set()


def test_what_users_call_names_its_parameters(documented):
    missing = {}
    for module, owner, function in functions(documented):
        if module.fullname in FOR_USERS:
            text = text_of(owner, function)
            unnamed = [name for name in parameters_of(owner, function) if not re.search(rf"\b{name}\b", text)]
            missing |= {function.fullname: unnamed} if unnamed else {}
    assert missing == {}


def test_what_users_call_with_arguments_says_what_it_raises(documented):
    silent = {
        function.fullname
        for module, owner, function in functions(documented)
        if module.fullname in FOR_USERS
        and parameters_of(owner, function)
        and not re.search(r"\w+Error|Raises", function.docstring)
    }
    assert silent == set()


def test_errors_that_a_function_raises_are_named(documented):
    unnamed = {}
    for _, owner, function in functions(documented):
        missing = {name for name in errors_raised(function) if name not in text_of(owner, function)}
        unnamed |= {function.fullname: missing} if missing else {}
    assert unnamed == {}


def test_arrays_have_a_shape_and_a_dtype(documented):
    vague = set()
    for _, owner, function in functions(documented):
        annotations = [p.annotation for p in function.signature.parameters.values()]
        annotations.append(function.signature.return_annotation)
        takes_arrays = any("ndarray" in str(a) or "torch.Tensor" in str(a) for a in annotations)
        text = text_of(owner, function)
        if takes_arrays and not (SHAPE.search(text) and DTYPE.search(text)):
            vague.add(function.fullname)
    assert vague == set()
