"""Compile an attention kernel to a callable.  The result is kept in memory, and on disk for later processes."""

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import tvm

import tir_kernels
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.compiling.cache_folder import cache_dir
from tir_kernels.compiling.cpu_threads import use_all_cores
from tir_kernels.compiling.forked import in_a_copy
from tir_kernels.compiling.load_library import load_library
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.errors import CompileError
from tir_kernels.pipelines import pipeline_of

ENTRY = "sparse_attention"


@functools.lru_cache(maxsize=256)
@one_at_a_time
def compile_attention(name: str, problem: AttentionProblem, config, target):
    """The kernel as a function of tensors: q, k, v, [bias], *mask operands, out (written in place).

    Tensors may be torch's or TVM's.  Equal arguments give the same function; a function compiled by an earlier process
    with the same sources and versions is loaded from `cache_dir()`.  Raises CompileError with the compiler's message.
    """
    (template,) = templates_for(target, name)
    if target.kind.name == "llvm":
        use_all_cores()

    def kernel() -> tvm.tirx.PrimFunc:
        with quick_script():
            return template.instantiate(problem, config, target)

    return _compiled((name, problem, config, str(target)), kernel, f"{template.NAME} ({config.label})", target)


def compile_step(function: tvm.tirx.PrimFunc, target):
    """A scheduled function that is no attention, such as a step of a plan (template.py), as one of tensors.

    It is kept as `compile_attention` keeps its own.
    """
    return _compile_step(tvm.ir.save_json(function), str(function.attrs["global_symbol"]), target)


@functools.lru_cache(maxsize=256)
@one_at_a_time
def _compile_step(text: str, symbol: str, target):
    return _compiled((text, str(target)), lambda: tvm.ir.load_json(text), symbol, target, symbol)


def _compiled(given: tuple, function: Callable[[], tvm.tirx.PrimFunc], what: str, target, symbol: str = ENTRY):
    """The function, loaded from the disk if it was compiled for what is `given` before."""
    key = hashlib.sha256(repr((*given, (tvm.__version__, _sources_digest()))).encode()).hexdigest()
    library = _load(key)
    if library is None:
        executable = _compile(function().with_attr("global_symbol", symbol), what, target)
        _store(key, executable)
        library = _load(key)  # what was just stored: compiling in memory would generate machine code a second time
        if library is None:
            library = executable.jit()
    return library[symbol]


def _compile(function: tvm.tirx.PrimFunc, what: str, target):
    module = tvm.IRModule({str(function.attrs["global_symbol"]): function})
    try:
        with target:
            return tvm.compile(module, target=target, tir_pipeline=pipeline_of(target))
    except Exception as error:
        raise CompileError(f"{what} for {target} did not compile: {error}") from error


@functools.cache
def _sources_digest() -> str:
    """Hash of this package's sources, so that an edited kernel is never served from the disk."""
    sha = hashlib.sha256()
    root = Path(tir_kernels.__file__).parent
    for path in sorted(root.rglob("*.py")):
        sha.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return sha.hexdigest()


def _load(key: str):
    """The library stored under a key, or None where there is none or its bytes are not those that were written."""
    library, checksum = cache_dir() / f"{key}.so", cache_dir() / f"{key}.json"
    try:
        stored = json.loads(checksum.read_text())["sha256"]
        if hashlib.sha256(library.read_bytes()).hexdigest() != stored:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return load_library(library)


def _store(key: str, executable) -> None:
    """Write the library and its checksum, each by an atomic rename; a cache that cannot be written is no error."""
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            library, checksum = Path(temporary, "kernel.so"), Path(temporary, "kernel.json")
            in_a_copy(lambda: executable.export_library(str(library)))  # LLVM ends a process that cannot write
            checksum.write_text(json.dumps({"sha256": hashlib.sha256(library.read_bytes()).hexdigest()}))
            os.replace(library, folder / f"{key}.so")
            os.replace(checksum, folder / f"{key}.json")
    except (OSError, RuntimeError):
        # A read-only or full disk, or no linker: the kernel in memory serves this process all the same.
        return
