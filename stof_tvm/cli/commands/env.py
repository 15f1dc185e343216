"""`stof env`: versions, GPU and compiler, to paste into a bug report."""

import importlib
import os
import platform
import shutil
import subprocess
from importlib import metadata

from stof_tvm.cli.command import new_command, print_answer

NEEDED = ("apache-tvm", "apache-tvm-ffi", "torch", "numpy", "xgboost")
OPTIONAL = ("transformers", "cuda-bindings", "matplotlib", "tornado")
GPU_FIELDS = ("name", "driver_version", "compute_cap", "memory.total")


def add_command(commands) -> None:
    new_command(
        commands,
        "env",
        _env,
        "versions, GPU, compiler, caches and logs, to paste into a bug report",
        "stof env",
        "Exits with 1 where something that is needed is missing.",
    )


def _env(arguments) -> int:
    found = environment()
    print_answer(arguments, found, _text(found))
    return 1 if found["problems"] else 0


def environment() -> dict:
    """What this installation runs on, and the "problems": what is needed and missing."""
    from stof_tvm import __version__

    versions = {name: _version(name) for name in NEEDED + OPTIONAL}
    problems = [f"{name} is not installed" for name in NEEDED if versions[name] is None]
    found = {
        "stof_tvm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": versions,
        "gpus": _gpus(),
        "nvcc": _nvcc(),
        "nvrtc": _nvrtc(),
    }
    if not problems:
        found |= _what_tvm_sees(found, problems)
    return {**found, "problems": problems}


def _what_tvm_sees(found: dict, problems: list[str]) -> dict:
    import tvm

    from tir_kernels.compiling.cache_folder import cache_dir
    from tir_kernels.target import local_cuda_arch, parse_target

    arch, cache = local_cuda_arch(), cache_dir()
    if found["gpus"] and arch is None:
        problems.append("there is a GPU, but TVM's CUDA runtime does not see it")
    if arch and not (found["nvcc"] or found["nvrtc"]):
        problems.append("there is a GPU, but neither nvcc nor NVRTC (pip install 'stof-tvm[cuda]')")
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        problems.append(f"the cache folder {cache} cannot be written: every process compiles its kernels again")
    return {
        "llvm": f"{tvm.target.codegen.llvm_version_major()}, {tvm.target.codegen.llvm_get_system_cpu()}",
        "cuda_arch": arch,
        "target": str(parse_target()),
        "cache": {"folder": str(cache), "kernels": len(list(cache.glob("*.so"))) if cache.is_dir() else 0},
        "tuning_logs": _tuning_logs(),
    }


def _tuning_logs() -> list[dict]:
    """A row for each architecture that has a log where `build` looks for them."""
    from stof_tvm.tuning.logs.log import RECORDS
    from stof_tvm.tuning.logs.replay import default_folders

    folders = dict.fromkeys(folder.resolve() for folder in default_folders())
    logs = [log for folder in folders if folder.is_dir() for log in sorted(folder.iterdir())]
    files = [(log, log / RECORDS) for log in logs if (log / RECORDS).exists()]
    return [{"folder": str(log), "records": len(file.read_bytes().splitlines())} for log, file in files]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict]:
    """Name, driver, compute capability and memory of each GPU, as nvidia-smi tells them."""
    lines = _output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader").splitlines()
    rows = [line.split(", ") for line in lines]
    names = ("name", "driver", "compute_capability", "memory")
    return [dict(zip(names, row)) for row in rows if len(row) == len(names)]


def _nvcc() -> str | None:
    lines = [line for line in _output("nvcc", "--version").splitlines() if "release" in line]
    return f"{lines[0].rpartition(', ')[2]}, {shutil.which('nvcc')}" if lines else None


def _nvrtc() -> str | None:
    try:
        _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError):  # RuntimeError: the package is here, its library is not
        return None
    return f"{major}.{minor}"


def _output(*command: str) -> str:
    """What a program prints, or nothing where it is not here or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(found: dict) -> str:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            rows = [f"{key} {'-' if entry is None else entry}" for key, entry in value.items()]
        elif isinstance(value, list):
            rows = [", ".join(f"{k} {v}" for k, v in row.items()) if isinstance(row, dict) else row for row in value]
        else:
            rows = [str(value or "none")]
        lines += [f"{name if number == 0 else '':<13}{row}" for number, row in enumerate(rows or ["none"])]
    return "\n".join(lines)
