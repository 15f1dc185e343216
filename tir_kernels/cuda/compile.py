"""Compile CUDA source.  Importing this module makes TVM embed code for the target, later GPUs and the GPU present.

TVM's own compile callback emits machine code for one architecture and nothing else, so a build for sm_80 does not
load on an H100.  Ours emits a fatbin with the target's machine code, its PTX and, if a GPU is present, that GPU's
machine code.  A driver compiles the PTX for any later GPU, but needs most of a minute for a large module.  There is no
PTX for sm_90a and the like, because no later GPU has their instructions.

Importing it also registers the TIR pipeline "stof", for IRModules that hold both kinds of functions: schedulable
TensorIR and hand-written TIRx kernels.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm.support import nvcc
from tvm.tirx import compilation_pipeline
from tvm.tirx.transform import Filter

from tir_kernels.cuda.dependent_launch import with_dependent_launches
from tir_kernels.cuda.device import architecture_suffix, is_newer
from tir_kernels.errors import CompileError
from tir_kernels.target import local_cuda_arch

tir_pipeline_name = "stof"

# What TVM passes to nvcc, without its ptxas tuning: kernels state their own register budget by launch bounds.
NVCC_FLAGS = (
    "-O3",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
)


NOT_FINITE = {"nan": "__int_as_float(0x7fc00000)", "inf": "__int_as_float(0x7f800000)"}


class KernelResources(NamedTuple):
    """What ptxas reports of a kernel.

    `spill_bytes` counts stores and loads; `static_shared_bytes` leaves out dynamic shared memory.  `serialized_wgmma`
    says that each wgmma waits for the one before it, because something else touches their accumulators in between.
    """

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    serialized_wgmma: bool


def have_nvcc() -> bool:
    """Whether nvcc is on the PATH."""
    return shutil.which("nvcc") is not None


def gencode(target_arch: str, present_arch: str | None) -> list[str]:
    """nvcc's -gencode options for a target such as "sm_80" and the GPU present, if any."""
    target = target_arch.removeprefix("sm_")
    options = ["-gencode", f"arch=compute_{target},code=sm_{target}"]
    if not architecture_suffix(target_arch):
        options += ["-gencode", f"arch=compute_{target},code=compute_{target}"]
        if present_arch and is_newer(present_arch, target_arch):
            present = present_arch.removeprefix("sm_")
            options += ["-gencode", f"arch=compute_{present},code=sm_{present}"]
    return options


@tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
def compile_cuda(source: str) -> bytes:
    """Machine code of CUDA source for `Target.current()`; TVM calls this to generate code, and to load source.

    The code comes from `ready_code` if it has any.  Otherwise nvcc makes a fatbin as described above; without nvcc,
    NVRTC makes machine code for the GPU present, else for the target.  Raises CompileError with the compiler's message.
    """
    pieces, arch = ready.get()
    if (code := pieces.get(hashlib.sha256(source.encode()).digest())) is not None:
        return code
    target = tvm.target.Target.current(allow_none=True)
    arch = str(target.attrs["arch"]) if target is not None else arch or local_cuda_arch()
    if arch is None:
        raise CompileError("CUDA source without a target: build inside `with target:`")
    if have_nvcc():
        return run_nvcc(source, "fatbin", gencode(arch, local_cuda_arch()))[0]
    suffixed = architecture_suffix(arch) != ""
    try:
        code = nvcc.compile_cuda(source, "cubin", arch if suffixed else local_cuda_arch() or arch, compiler="nvrtc")
    except RuntimeError as error:
        raise CompileError(f"NVRTC refused the CUDA source for {arch}: {error}") from error
    return bytes(code)


@tvm_ffi.register_global_func("tvm_callback_cuda_postproc", override=True)
def with_numbers(source: str, _target) -> str:
    """CUDA source in which NaN and infinities of bfloat16 are numbers; TVM writes names that are none of CUDA's."""
    return re.sub(r"\b(nan|inf)f/\*-?\1\*/", lambda name: NOT_FINITE[name[1]], source)


def run_nvcc(source: str, target_format: str, options: list[str]) -> tuple[bytes, str]:
    """nvcc's output in "ptx", "cubin" or "fatbin" format, and what it and ptxas printed.

    Raises CompileError, with what was printed, where nvcc refuses the source.
    """
    with tempfile.TemporaryDirectory() as folder:
        code, binary = Path(folder, "kernels.cu"), Path(folder, f"kernels.{target_format}")
        code.write_text(source)
        command = ["nvcc", f"--{target_format}", *NVCC_FLAGS, "-Xptxas", "-v", *options, "-o", str(binary), str(code)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        log = result.stdout + result.stderr
        if result.returncode:
            raise CompileError(f"nvcc refused the CUDA source ({' '.join(options)}):\n{log}")
        return binary.read_bytes(), log


def cuda_source(executable) -> str:
    """The CUDA source in a compiled executable or module, all its kernels together; CompileError where it has none."""
    sources = [module.inspect_source() for module in cuda_modules(executable)]
    if not sources:
        raise CompileError("the executable holds no CUDA module")
    return "\n".join(sources)


def resource_usage(source: str, arch: str) -> list[KernelResources]:
    """What ptxas reports of each kernel of `source` on `arch` ("sm_80", "sm_90a")."""
    number = arch.removeprefix("sm_")
    _, log = run_nvcc(source, "cubin", ["-gencode", f"arch=compute_{number},code=sm_{number}"])
    kernels = []
    for name, body in re.findall(r"Compiling entry function '(\w+)' for '\w+'\n(.*?)Compile time", log, re.DOTALL):
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", body))
        (stack,) = map(int, re.findall(r"(\d+) bytes stack frame", body)[:1])
        (registers,) = map(int, re.findall(r"Used (\d+) registers", body)[:1])
        shared = re.search(r"(\d+) bytes smem", body)
        static = int(shared.group(1)) if shared else 0
        serialized = re.search(rf"instructions are serialized .* function '{name}'", log) is not None
        kernels.append(KernelResources(name, registers, spills, stack, static, serialized))
    return kernels


def _mixed_pipeline():
    """Lowers each function by the pipeline of its dialect; the host and device finalizers are the same for both.

    On sm_90 and up every kernel is launched while the one before it still runs.
    """
    schedulable, host, device = compilation_pipeline.get_tir_pipeline("default")
    tirx, _, _ = compilation_pipeline.get_tir_pipeline("tirx")

    def is_schedulable(func) -> bool:
        return bool(func.attrs is not None and func.attrs.get("s_tir", False))

    @tvm.transform.module_pass(opt_level=0)
    def lower(mod: tvm.IRModule, _ctx) -> tvm.IRModule:
        lowered = tvm.IRModule({}, attrs=mod.attrs)
        for pipeline, belongs in ((schedulable, is_schedulable), (tirx, lambda f: not is_schedulable(f))):
            part = Filter(belongs)(mod)
            if part.functions:
                lowered.update(pipeline(part))
        return lowered

    return with_dependent_launches(lower), host, device


compilation_pipeline.register_tir_pipeline(tir_pipeline_name, _mixed_pipeline)


# Set by `ready_code`: (SHA-256 of a source -> its machine code, the architecture to compile any other source for).
ready: ContextVar[tuple[dict[bytes, bytes], str | None]] = ContextVar("ready", default=({}, None))


def cuda_modules(executable):
    """The CUDA modules in a compiled executable or module."""
    modules = [getattr(executable, "mod", executable)]
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if module.kind == "cuda":
            yield module
