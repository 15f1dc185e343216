"""The code of the compiling processes: each call builds one kernel into one library.

CUDA source is compiled for the one GPU that will run it: by NVRTC where that can be imported, since it starts no
process, else by nvcc.  Machine code is kept in a file named by the hash of its source, so that equal kernels are
compiled once; the file begins with a hash of the code, by which damage is noticed.
"""

import contextlib
import functools
import hashlib
import os
from pathlib import Path

import tvm
import tvm_ffi
from tvm.support import nvcc

from relax_passes.schedule.cpu import ScheduleForCPU, finish
from relax_passes.schedule.cuda import ScheduleForCUDA
from relax_passes.schedule.repairs import REPAIRS
from stof_tvm.saving.whole_file import write_whole
from stof_tvm.tuning.measuring.job import LIBRARY, KernelJob
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.compile import gencode, run_nvcc
from tir_kernels.pipelines import pipeline_of
from tir_kernels.tuning.template_space import TEMPLATES

ENTRY = "main"
DIGEST_BYTES = 32


def prepare(niceness: int, gpu_arch: str | None, code_folder: str) -> None:
    """Initialise a process: its niceness, the GPU it compiles for (None: none), and where machine code is kept."""
    os.nice(niceness)
    if gpu_arch is not None:
        compile_source = functools.partial(_compile_source, gpu_arch, Path(code_folder))
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_source, override=True)


def compile_kernel(job: KernelJob, target: dict, folder: str) -> None:
    """Build a template's kernel into `folder`."""
    parsed = tvm.target.Target(target)
    with quick_script():
        function = TEMPLATES[job.template].instantiate(job.problem, job.config, parsed)
    _build(function, parsed, folder)


def compile_schedule(module: str, target: dict, folder: str, by_default: bool) -> None:
    """Build the PrimFunc "main" of a module, given as JSON, into `folder`; with `by_default`, schedule it first."""
    parsed = tvm.target.Target(target)
    mod = tvm.ir.load_json(module)
    if by_default:
        schedule = ScheduleForCUDA if parsed.kind.name == "cuda" else ScheduleForCPU
        mod = tvm.transform.Sequential([schedule(parsed)])(mod)
    elif parsed.kind.name == "llvm":
        mod = tvm.IRModule({ENTRY: finish(mod[ENTRY])})
    mod = tvm.transform.Sequential(REPAIRS)(mod)
    _build(mod[ENTRY], parsed, folder)


def _build(function, target, folder: str) -> None:
    mod = tvm.IRModule({ENTRY: function.with_attr("global_symbol", ENTRY)})
    with target:
        executable = tvm.compile(mod, target=target, tir_pipeline=pipeline_of(target))
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Under another name until it is complete: a process may be killed at any moment.
    unfinished = str(Path(folder, f"{os.getpid()}.so"))
    executable.export_library(unfinished)
    os.replace(unfinished, Path(folder, LIBRARY))


def _compile_source(gpu_arch: str, folder: Path, source: str) -> bytes:
    """Machine code of CUDA source for a GPU."""
    path = folder / hashlib.sha256(f"{gpu_arch}\n{source}".encode()).hexdigest()
    if (kept := _kept(path)) is not None:
        return kept
    if _have_nvrtc():
        code = bytes(nvcc.compile_cuda(source, "cubin", gpu_arch, compiler="nvrtc"))
    else:
        code, _ = run_nvcc(source, "cubin", gencode(gpu_arch, None)[:2])
    # A cache that cannot be written is no error.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(code).digest() + code)
    return code


def _kept(path: Path) -> bytes | None:
    """Machine code from the cache; None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _have_nvrtc() -> bool:
    try:
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError:
        return False
    return True
