"""Runs generated CUDA on the CPU, thread by thread, so that a kernel's results are checked where there is no GPU.

Its text is compiled by g++ against `cuda_emulator.h` and linked to `cuda_emulator.cpp`, with TVM's inline-assembly
helpers replaced by functions of the same meaning.  CTAs run one after another, or the CTAs of a cluster together, in
the order asked for; memory errors and stuck barriers raise.
"""

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
GXX = ["g++", "-std=c++17", "-Og", "-w", "-fno-strict-aliasing", "-fPIC"]
HELPER = re.compile(r"^(?:template <[^>]*>\s)?__forceinline__ __device__ .*?^}", re.DOTALL | re.MULTILINE)


@functools.cache
def _emulator() -> tuple[str, str]:
    """The emulator's library, and a folder with its header as g++ reads it fastest; made once a process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    library = f"{folder}/cuda_emulator.so"
    subprocess.run([*GXX, "-O2", "-shared", "-o", library, str(HERE / "cuda_emulator.cpp")], check=True)
    header = f"{folder}/cuda_emulator.h.gch"
    subprocess.run([*GXX, "-x", "c++-header", "-o", header, str(HERE / "cuda_emulator.h")], check=True)
    return library, folder


class EmulatedKernel:
    """The kernel `main_kernel` of CUDA source that TVM generated; `folder` receives the compiled library."""

    def __init__(self, source: str, folder: Path):
        start = source.index('extern "C" __global__')
        helpers = [_without_assembly(text) for text in HELPER.findall(source[:start])]
        declaration = r"extern __shared__ \S+ uchar shared_ptr\[\];"
        body = re.sub(declaration, "uchar* shared_ptr = (uchar*)shared_memory;", source[start:])
        # Arrays of a CTA, whose threads run in turn, before the next CTA begins.
        body = re.sub(r"__shared__ (alignas\(\d+\)) ", r"\1 static ", body)
        parameters = re.search(r"main_kernel\((.*?)\);", body).group(1).split(", ")
        self.parameters = [p.split()[-1] for p in parameters]
        arguments = [
            f"({p.rsplit(' ', 1)[0].replace('__restrict__', '')})arguments[{i}]"
            if "*" in p
            else f"*(CUtensorMap*)arguments[{i}]"
            if "CUtensorMap" in p
            else f"*(float*)&arguments[{i}]"
            if p.startswith("float ")
            else f"(int)(intptr_t)arguments[{i}]"
            for i, p in enumerate(parameters)
        ]
        code = ['#include "cuda_emulator.h"', *helpers, body, LAUNCH.replace("ARGUMENTS", ", ".join(arguments))]
        (folder / "kernel.cpp").write_text("\n".join(code))
        library, header = _emulator()
        files = ["-o", str(folder / "kernel.so"), str(folder / "kernel.cpp"), library]
        subprocess.run([*GXX, "-shared", "-I", header, *files], check=True)
        self.launch = ctypes.CDLL(str(folder / "kernel.so")).launch
        self.launch.restype = ctypes.c_char_p

    def __call__(
        self,
        arrays: dict[str, np.ndarray],
        sizes: dict[str, int | float],
        ctas,
        threads: int,
        shared_bytes: int,
        cluster=1,
    ):
        """Run CTAs in the order of `ctas`; `arrays` by buffer name, `sizes` by the name of an extent or a number.

        Each `cluster` CTAs that follow one another in `ctas` are one.

        A tensor map is what `tensor_map` gives, by its own name.
        """
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        numbers = {n: int(np.float32(x).view(np.uint32)) if isinstance(x, float) else x for n, x in sizes.items()}
        values = [pointers.get(n.removesuffix("_ptr"), numbers.get(n)) for n in self.parameters]
        buffers = [number for a in arrays.values() for number in (a.ctypes.data, a.nbytes)]
        failure = self.launch(
            (ctypes.c_void_p * len(values))(*values),
            (ctypes.c_size_t * len(buffers))(*buffers),
            len(arrays),
            (ctypes.c_int * len(ctas))(*ctas),
            len(ctas),
            cluster,
            threads,
            ctypes.c_size_t(shared_bytes),
        )
        if failure:
            raise RuntimeError(failure.decode())


LAUNCH = """
static void** arguments;
extern "C" const char* launch(void** values, const Buffer* buffers, int n_buffers, int* ctas, int n_ctas,
                              int cluster_size, int n_threads, size_t shared_bytes) {
  arguments = values;
  return run([] { main_kernel(ARGUMENTS); }, buffers, n_buffers, ctas, n_ctas, cluster_size, n_threads,
             shared_bytes);
}
"""


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 256 bytes, as CUDA allocations do."""
    memory = np.zeros(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensor_map(array: np.ndarray, offset: int, fields: tuple[int, ...]) -> np.ndarray:
    """A map of `array` from its element `offset` on, of 16 bits; `fields` are those of cuTensorMapEncodeTiled.

    They are sizes, strides in bytes, sizes and steps of a box, and four modes, and obey the rules of the driver.
    """
    rank = (len(fields) - 3) // 4
    start = array.ctypes.data + 2 * offset
    sizes, strides, box, steps, modes = np.split(np.array(fields), np.cumsum([rank, rank - 1, rank, rank]))
    assert len(modes) == 4 and 1 <= rank <= 5 and start % 16 == 0
    assert (
        (sizes > 0).all() and (sizes <= 2**32).all() and (box > 0).all() and (box <= 256).all() and (steps == 1).all()
    )
    assert (strides % 16 == 0).all() and (strides > 0).all() and (strides < 2**40).all()
    assert modes[0] == 0 and modes[1] in (1, 2, 3) and box[0] * 2 <= 16 << modes[1] and modes[3] == 0
    encoded = np.zeros(25, np.uint64)
    encoded[: 2 + len(fields)] = [start, rank, *fields]
    return encoded


def _without_assembly(helper: str) -> str:
    """One of TVM's device functions with its instruction as a call of the header's; others as they are."""
    signature = helper[: helper.index("{")]
    if 'asm volatile("" ' in helper:  # nothing but an order of instructions
        return signature + "{}"
    if "%%cluster_ctarank" in helper:
        return signature + "{ return cluster_rank(); }"
    if "mbarrier.try_wait" in helper:
        return signature + "{ mbarrier_wait(barrier, phase); }"
    if product := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16).*([01]); }", helper):
        columns, bfloat, transposed = int(product[1]), "true" if product[2] == "bf16" else "false", product[3]
        d = ", ".join(f"&__d{i}" for i in range(columns // 2))
        code = f"float* d[] = {{{d}}}; uint32_t a[4];"
        if "__a_desc" in helper:
            code += " load_wgmma_a(a, __a_desc);"
        else:
            code += "".join(f" a[{i}] = __a{i};" for i in range(4))
        return signature + f"{{ {code} wgmma({bfloat}, {columns}, d, a, __b_desc, __scale_d, {transposed}); }}"
    assembly = re.search(r'asm(?: volatile)?\("([^ ;"]+)(.*?);"', helper)
    if assembly is None:
        return helper
    names = re.findall(r"(\w+)(?=[,)])", signature[signature.index("(") :])
    return signature + "{ " + _meaning(assembly.group(1), assembly.group(2), names) + " }"


def _meaning(instruction: str, operands: str, names: list[str]) -> str:
    """C++ for a PTX instruction whose operands are the parameters `names`."""
    bfloat = "true" if ".bf16" in instruction else "false"
    if instruction.startswith("cp.async.cg"):
        return f"cp_async({', '.join(names)});"
    if instruction in ("prefetch.tensormap", "griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        return ""
    if instruction in ("prefetch.global.L1", "prefetch.global.L2"):
        return f"global_address({names[0]}, 1);"
    if instruction.startswith("wgmma.fence"):
        return ""
    if instruction.startswith("wgmma.commit_group"):
        return "wgmma_commit();"
    if instruction.startswith("wgmma.wait_group"):
        return f"wgmma_wait({operands});"
    if instruction.startswith("fence.proxy.async"):
        return "fence_async();"
    if instruction in ("bar.sync", "bar.arrive"):
        return f"{instruction.replace('.', '_')}({', '.join(names)});"
    if instruction.startswith("barrier.cluster."):
        return f"cluster_{instruction.split('.')[2]}();"
    if instruction == "mapa.shared::cluster.u32":
        return f"{names[0]} = cluster_address({names[1]}, {names[2]});"
    if instruction.startswith("setmaxnreg"):
        return ""
    if instruction == "cp.async.mbarrier.arrive.noinc.shared::cta.b64":
        return f"cp_async_arrive({names[0]});"
    if instruction.startswith("mbarrier."):
        function = instruction.removesuffix(".shared::cta.b64").replace("arrive.expect_tx", "expect").replace(".", "_")
        return f"{function}({', '.join(names)});"
    if re.match(r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cluster\.global\.tile\.", instruction):
        to, tensor_map, *first, barrier = names
        return f"copy_box({to}, {tensor_map}, {{{', '.join(first)}}}, {barrier});"
    if instruction.startswith("cp.async.bulk.shared::cluster.global.mbarrier::"):
        return f"copy_line({', '.join(names)});"
    if instruction == "cp.async.commit_group":
        return "commit_group();"
    if instruction == "cp.async.wait_group":
        return f"wait_group({operands});"
    if instruction.startswith("ldmatrix.sync.aligned.m8n8.x4."):
        pointers = ", ".join("&" + n for n in names[:4])
        transposed = "true" if ".trans." in instruction else "false"
        return f"uint32_t* r[] = {{{pointers}}}; ldmatrix({transposed}, r, {names[4]});"
    if instruction.startswith("mma.sync.aligned.m16n8k16.row.col.f32."):
        d, a, b, c = names[:4], names[4:8], names[8:10], names[10:]
        return (
            f"float* d[] = {{{', '.join('&' + n for n in d)}}}; uint32_t a[] = {{{', '.join(a)}}}; "
            f"uint32_t b[] = {{{', '.join(b)}}}; float c[] = {{{', '.join(c)}}}; mma({bfloat}, d, a, b, c);"
        )
    if instruction == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
        d, a, b, c = names[:4], names[4:8], names[8:10], names[10:]
        return (
            f"float* d[] = {{{', '.join('&' + n for n in d)}}}; uint32_t a[] = {{{', '.join(a)}}}; "
            f"uint32_t b[] = {{{', '.join(b)}}}; float c[] = {{{', '.join(c)}}}; mma_tf32(d, a, b, c);"
        )
    if instruction == "cvt.rna.tf32.f32":
        return f"{names[0]} = round_tf32({names[1]});"
    if instruction in ("min.f32", "max.f32"):  # of NaN and a number, the number
        return f"{names[0]} = std::f{instruction[:3]}({names[1]}, {names[2]});"
    if instruction == "sub.rn.f32":
        return f"{names[0]} = {names[1]} - {names[2]};"
    if re.fullmatch(r"cvt\.rn\.b?f16x2\.f32", instruction):
        return f"{names[0]} = narrow_pair({bfloat}, {names[1]}, {names[2]});"
    if re.fullmatch(r"atom\.(acq_rel|relaxed)\.gpu\.global\.inc\.u32", instruction):
        return f"{names[0]} = atomic_increment({names[1]}, {names[2]});"
    access = r"(ld|st)\.(shared|shared::cluster|global)(\.cg|\.nc|\.L1::no_allocate)?(\.v[24])?\.[bf](16|32)"
    if access := re.fullmatch(access, instruction):
        values, size = [n for n in names if n != "__addr"], int(access[5]) // 8
        space = "shared" if ".shared" in instruction else "global"
        code = f"char* p = {space}_address(__addr, {size * len(values)});"
        for i, name in enumerate(values):
            ends = f"&{name}, p + {size * i}" if instruction.startswith("ld") else f"p + {size * i}, &{name}"
            code += f" memcpy({ends}, {size});"
        if space == "shared":
            code += f" {'read' if instruction.startswith('ld') else 'wrote'}_shared(__addr, {size * len(values)});"
        return code
    raise NotImplementedError(f"the emulator does not know {instruction}")
