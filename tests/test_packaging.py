"""What pyproject.toml promises about the installation."""

from importlib import metadata
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project():
    if tomllib is None:
        pytest.skip("tomllib needs Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_tvm_ffi_that_crashes_save_json_is_shut_out(project):
    (ffi,) = [d for d in project["project"]["dependencies"] if d.startswith("apache-tvm-ffi")]
    assert ffi == "apache-tvm-ffi>=0.1.14.post0,<0.1.15"
    assert metadata.version("apache-tvm-ffi").startswith("0.1.14")


def test_exactly_three_packages_are_installed(project):
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {"stof_tvm", "relax_passes", "tir_kernels"}
    on_disk = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for name in ("stof_tvm", "relax_passes", "tir_kernels")
        for path in (ROOT / name).rglob("*.py")
    }
    assert on_disk == set(found), "every folder with modules needs an __init__.py"


def test_console_script_and_torch_backend(project):
    import importlib

    for group in (project["project"]["scripts"], project["project"]["entry-points"]["torch_dynamo_backends"]):
        for name, target in group.items():
            module, _, attribute = target.partition(":")
            assert name == "stof" and callable(getattr(importlib.import_module(module), attribute))
