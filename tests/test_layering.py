"""The layers of the house: imports point down, among packages and folders, and in no circle; folders stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tir_kernels", "relax_passes", "stof_tvm")
FORBIDDEN = {
    "tir_kernels": {"relax_passes", "stof_tvm", "torch"},
    "relax_passes": {"stof_tvm", "torch"},
    "stof_tvm": {"tests", "benchmarks"},
}
# The folders of a package: each imports what stands before it, and none what stands behind.
FOLDERS = {
    "tir_kernels": ("compiling", "cuda", "masks", "selection", "attention", "fusion", "problems", "tuning"),
    "relax_passes": (
        "ir",
        "legalizations",
        "attention",
        "parallel",
        "read_rows",
        "token_order",
        "fusion",
        "schedule",
        "runtime",
    ),
}
# Methods of Mask that are short for functions which take a mask: m.split(n), m.plot(…), m & tensor; and an argument of
# sparse_attention that is short for the same attention of several ranks.
SHORTHANDS = {
    ("stof_tvm.masks.mask", "stof_tvm.masks.windows"),
    ("stof_tvm.masks.mask", "stof_tvm.pictures.mask_blocks"),
    ("stof_tvm.masks.mask", "stof_tvm.given_masks"),
    ("stof_tvm.attention", "stof_tvm.parallel.context.attention"),
}
MOST_FILES = 12
LARGER = {
    "benchmarks": "a script for each question",
    "benchmarks/peers": "a file for each peer",
    "tests": "a folder's tests mirror it, and its helpers lie beside them",
}


def imported(path: Path) -> set[str]:
    """What a file imports, not for type checkers only: `a.b`, and of `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))
    return names


def modules() -> dict[str, Path]:
    """The project's modules by their dotted names; a package's is its folder's."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def graph(found: dict[str, Path]) -> dict[str, set[str]]:
    """Which modules each imports; a package counts only where nothing in it is named."""
    edges = {}
    for name, path in found.items():
        wanted = imported(path) & found.keys()
        edges[name] = {other for other in wanted if not any(more.startswith(f"{other}.") for more in wanted)} - {name}
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some modules that import one another in turn, or none."""
    state: dict[str, int] = {}  # 1: on the way, 2: done
    way: list[str] = []

    def visit(name):
        state[name] = 1
        way.append(name)
        for other in sorted(edges.get(name, ())):
            if state.get(other) == 1:
                return way[way.index(other) :]
            if other not in state and (found := visit(other)):
                return found
        state[name] = 2
        way.pop()
        return []

    for name in sorted(edges):
        if name not in state and (found := visit(name)):
            return found
    return []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    tops = {path: {name.partition(".")[0] for name in imported(path)} for path in files}
    upward = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in tops[path] & FORBIDDEN[package]}
    assert not upward


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_of_a_package_import_only_what_lies_below_them(package):
    upward = []
    for place, folder in enumerate(FOLDERS[package]):
        above = {(package, name) for name in FOLDERS[package][place + 1 :]}
        for path in (ROOT / package / folder).rglob("*.py"):
            found = (name for name in imported(path) if tuple(name.split(".")[:2]) in above)
            upward += [f"{path.relative_to(ROOT)}: {name}" for name in found]
    assert upward == []
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    assert folders == {*FOLDERS[package]}


def test_no_modules_import_one_another():
    edges = graph(modules())
    for name, other in SHORTHANDS:
        assert other in edges[name], "gone: take it out of SHORTHANDS"
        edges[name].remove(other)
    assert circle(edges) == []


def test_folders_are_small():
    counts = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts[:-1]
        if parts and not parts[0].startswith(".") and parts[0] != "build" and path.name != "__init__.py":
            counts["/".join(parts)] = counts.get("/".join(parts), 0) + 1
    large = {name: count for name, count in counts.items() if count > MOST_FILES}
    assert {name: n for name, n in large.items() if name not in LARGER and not name.startswith("tests/")} == {}


def test_the_checks_see_what_they_are_for(tmp_path):
    (tmp_path / "module.py").write_text("def f():\n    from stof_tvm import masks\n")
    assert {"stof_tvm", "stof_tvm.masks"} <= imported(tmp_path / "module.py")
    (tmp_path / "module.py").write_text("if TYPE_CHECKING:\n    from stof_tvm import masks\n")
    assert not imported(tmp_path / "module.py")
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"] and circle({"a": {"b"}, "b": {"c"}}) == []
