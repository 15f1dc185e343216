"""What pyproject.toml promises about the installation, and what a wheel brings."""

import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest

import stof_tvm

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parent.parent
PACKAGES = ("relax_passes", "stof_tvm", "tir_kernels")
LOGS = ("database_checksums.json", "database_tuning_record.json", "database_workload.json", "fusion_schemes.json")


@pytest.fixture(scope="module")
def project():
    if tomllib is None:
        pytest.skip("tomllib needs Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the tree, built without network; in a copy, which no earlier build has left anything in."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tuning_logs", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir", "dist"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", *options, "."], cwd=copy, check=True)
    (file,) = copy.glob("dist/*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def in_dist_info(wheel, name: str) -> bytes:
    return wheel.read(f"stof_tvm-{stof_tvm.__version__}.dist-info/{name}")


def test_a_wheel_has_the_packages_and_the_logs_and_nothing_else(wheel):
    brought = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    data = [
        path
        for folder in (*PACKAGES, "tuning_logs")
        for name in ("py.typed", *LOGS)
        for path in (ROOT / folder).rglob(name)
    ]
    assert brought == {str(path.relative_to(ROOT)) for path in (*sources, *data)}
    # `build` looks for the logs beside the packages, type checkers for py.typed in them.
    assert {"stof_tvm/py.typed", "relax_passes/py.typed", "tuning_logs/sm_90a/database_workload.json"} <= brought


def test_metadata_of_a_wheel(wheel, project):
    told = message_from_bytes(in_dist_info(wheel, "METADATA"))
    assert (told["Name"], told["Version"]) == ("stof-tvm", stof_tvm.__version__)
    assert told["Summary"] == project["project"]["description"]
    assert set(told["Requires-Python"].split(",")) == set(project["project"]["requires-python"].split(","))
    assert told.get_payload().startswith("# stof_tvm")
    assert told["License-Expression"] == "Apache-2.0" and b"Apache License" in in_dist_info(wheel, "licenses/LICENSE")
    needed = [requirement for requirement in told.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert len(needed) == len(project["project"]["dependencies"])
    assert set(told.get_all("Provides-Extra")) == set(project["project"]["optional-dependencies"])


def test_entry_points_of_a_wheel(wheel):
    assert in_dist_info(wheel, "entry_points.txt").decode().split() == [
        *("[console_scripts]", "stof", "=", "stof_tvm.cli:main"),
        *("[torch_dynamo_backends]", "stof", "=", "stof_tvm.dynamo.backend:stof"),
    ]


def test_the_change_log_begins_with_this_version():
    versions = re.findall(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0][0] == stof_tvm.__version__ and re.fullmatch(r"\d+\.\d+\.\d+", versions[0][0])
    assert all(date == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in versions)


def test_what_make_installs_is_pinned_within_the_ranges(project):
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [(x.name, str(x.specifier).removeprefix("==")) for x in map(Requirement, lines)]
    extras = project["project"]["optional-dependencies"].values()
    allowed = [Requirement(text) for texts in (project["project"]["dependencies"], *extras) for text in texts]
    assert {name for name, _ in pinned} <= {requirement.name for requirement in allowed}
    wrong = [
        str(x) for x in allowed for name, version in pinned if x.name == name and not x.specifier.contains(version)
    ]
    assert not wrong


def test_tvm_ffi_that_crashes_save_json_is_shut_out(project):
    (ffi,) = [d for d in project["project"]["dependencies"] if d.startswith("apache-tvm-ffi")]
    assert ffi == "apache-tvm-ffi>=0.1.14.post0,<0.1.15"
    assert metadata.version("apache-tvm-ffi").startswith("0.1.14")


def test_exactly_three_packages_are_installed(project):
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == set(PACKAGES)
    on_disk = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
    }
    assert on_disk == set(found), "every folder with modules needs an __init__.py"


def test_console_script_and_torch_backend(project):
    for group in (project["project"]["scripts"], project["project"]["entry-points"]["torch_dynamo_backends"]):
        for name, target in group.items():
            module, _, attribute = target.partition(":")
            assert name == "stof" and callable(getattr(importlib.import_module(module), attribute))


def test_hooks_use_what_make_installs(project):
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"^ +entry: \.venv/bin/(\S+)", hooks, re.M)
    assert {"ruff", "mypy", "end-of-file-fixer"} <= set(entries)
    installed = {script.name for script in metadata.entry_points(group="console_scripts")} | {"ruff", "mypy"}
    assert set(entries) <= installed
