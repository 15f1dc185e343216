"""Imports point down only: stof_tvm → relax_passes → tir_kernels."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "tir_kernels": {"relax_passes", "stof_tvm", "torch"},
    "relax_passes": {"stof_tvm", "torch"},
    "stof_tvm": {"tests", "benchmarks"},
}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    upward = {
        f"{path.relative_to(ROOT)}: {name}" for path in files for name in imported_packages(path) & FORBIDDEN[package]
    }
    assert not upward


def test_the_check_sees_an_upward_import(tmp_path):
    (tmp_path / "module.py").write_text("def f():\n    from stof_tvm import masks\n")
    assert imported_packages(tmp_path / "module.py") & FORBIDDEN["tir_kernels"]
