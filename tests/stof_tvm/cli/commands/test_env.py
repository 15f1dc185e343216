"""`stof env`: what it finds, and what it misses."""

import platform
from importlib import metadata

from stof_tvm import __version__
from stof_tvm.cli.commands import env
from stof_tvm.tuning.logs.log import RECORDS


def test_versions_and_places(stof, tmp_path, monkeypatch, kernel_cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuning_logs" / "sm_80").mkdir(parents=True)
    (tmp_path / "tuning_logs" / "sm_80" / RECORDS).write_text("[]\n[]\n")
    status, found, errors = stof("env", "--json")
    assert (status, errors, found["problems"]) == (0, "", [])
    assert (found["stof_tvm"], found["python"]) == (__version__, platform.python_version())
    assert found["packages"]["apache-tvm"] == metadata.version("apache-tvm")
    assert found["cache"]["folder"] == str(kernel_cache)
    assert {"folder": str(tmp_path / "tuning_logs" / "sm_80"), "records": 2} in found["tuning_logs"]
    status, text, _ = stof("env")
    assert f"torch {metadata.version('torch')}" in text and "records 2" in text


def test_a_gpu_without_a_compiler_is_a_problem(stof, monkeypatch):
    gpu = "NVIDIA H200, 580.1, 9.0, 143771 MiB\n"
    monkeypatch.setattr(env, "_output", lambda *command: gpu if command[0] == "nvidia-smi" else "")
    monkeypatch.setattr("tir_kernels.target.local_cuda_arch", lambda: "sm_90a")
    monkeypatch.setattr(env, "_nvrtc", lambda: None)
    status, found, _ = stof("env", "--json")
    assert found["gpus"] == [
        {"name": "NVIDIA H200", "driver": "580.1", "compute_capability": "9.0", "memory": "143771 MiB"}
    ]
    assert (status, found["cuda_arch"], found["nvcc"]) == (1, "sm_90a", None)
    (problem,) = found["problems"]
    assert "neither nvcc nor NVRTC" in problem


def test_nvcc_is_told_with_its_place(monkeypatch):
    monkeypatch.setattr(env, "_output", lambda *_: "Cuda compiler\nCuda compilation tools, release 13.0, V13.0.88\n")
    monkeypatch.setattr(env.shutil, "which", lambda _: "/opt/bin/nvcc")
    assert env._nvcc() == "V13.0.88, /opt/bin/nvcc"


def test_a_missing_package_is_a_problem(stof, monkeypatch):
    monkeypatch.setattr(env, "NEEDED", ("numpy", "no-such-package"))
    status, text, _ = stof("env")
    assert status == 1 and "no-such-package is not installed" in text
    assert env._output("no-such-program") == ""
