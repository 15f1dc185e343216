"""What the emulator of CUDA refuses: kernels that a GPU may run wrongly, or for ever, or rightly by luck."""

import shutil

import numpy as np
import pytest

from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned, tensor_map

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
LINE = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
HELPERS = {  # as TVM writes them: name, parameters, instruction
    "init": ("uint32_t a, uint32_t n", "mbarrier.init.shared::cta.b64 [%0], %1;"),
    "expect": ("uint32_t a, uint32_t n", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"),
    "arrive": ("uint32_t a, uint32_t n", "mbarrier.arrive.shared::cta.b64 _, [%0], %1;"),
    "wait": ("unsigned int barrier, int phase", "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1, %2;"),
    "meet": ("uint32_t a, uint32_t n", "bar.sync %0, %1;"),
    "pass": ("uint32_t a, uint32_t n", "bar.arrive %0, %1;"),
    "copy4": ("uint32_t to, const void* m, int x, int y, int z, int w, uint32_t bar", COPY.format(4) + " […];"),
    "line": ("uint32_t to, const void* from, uint32_t n, uint32_t bar", LINE + " [%0], [%1], %2, [%3];"),
    "fence": ("", "fence.proxy.async.shared::cta;"),
    "commit": ("", "wgmma.commit_group.sync.aligned;"),
    "finish": ("", "wgmma.wait_group.sync.aligned 0;"),
    "store": ("uint32_t __addr, uint32_t __value", "st.shared.b32 [%0], %1;"),
    "load": ("uint32_t& __d, uint32_t __addr", "ld.shared.b32 %0, [%1];"),
    "product": (
        "float& __d0, float& __d1, float& __d2, float& __d3, uint64_t __a_desc, uint64_t __b_desc, uint32_t __scale_d",
        PRODUCT + " {%0, %1, %2, %3}, %4, %5, ps0, 1, 1, 0, 0; }",
    ),
}


def kernel(folder, body: str) -> EmulatedKernel:
    """A kernel of `x`, `y` and the map `m` of x; its body finds `thread`, and `f`, four zeros."""
    helpers = [
        f'__forceinline__ __device__ void {name}({parameters}) {{\n  asm volatile("{instruction}" : : );\n}}'
        for name, (parameters, instruction) in HELPERS.items()
    ]
    head = 'extern "C" __global__ void main_kernel(half* x_ptr, uint* y_ptr, const __grid_constant__ CUtensorMap m)'
    start = "int thread = threadIdx.x; float f[4] = {0, 0, 0, 0};"
    return EmulatedKernel("\n".join([*helpers, f"{head};", f"{head} {{ {start} {body} }}"]), folder)


def run(folder, body: str, threads=128, sizes=(64, 8, 3, 2), box=(64, 8, 1, 1)) -> tuple[np.ndarray, np.ndarray]:
    """x, halves of four dimensions in a box's order reversed, and y of 4096 words, after a run of one CTA."""
    x = aligned(np.arange(1, np.prod(sizes) + 1).astype(np.float16).reshape(sizes[::-1]))
    y = aligned(np.zeros(4096, np.uint32))
    swizzle = {64: 3, 32: 2, 16: 1}[box[0]]
    fields = (*sizes, *x.strides[2::-1], *box, 1, 1, 1, 1, 0, swizzle, 3, 0)
    kernel(folder, body)({"x": x, "y": y, "m": tensor_map(x, 0, fields)}, {}, [0], threads, 16384)
    return x, y


START = "if (thread == 0) { init(8192, 1); fence(); } __syncthreads(); "
BOX = "expect(8192, 1024); copy4(0, &m, 0, 0, 0, 0, 8192); "
ROWS_OF_B = (1 << 62) + (64 << 32)  # a descriptor of rows of 128 bytes
MULTIPLY = f"product(f[0], f[1], f[2], f[3], {ROWS_OF_B}ull, {ROWS_OF_B}ull, 0); commit(); "
WRONG = {
    "some threads wait for ever": {
        "nobody arrives": START + "wait(8192, 0);",
        "an arrival too few": START + "if (thread == 0) init(8200, 128); __syncthreads();"
        " if (thread) arrive(8200, 1); wait(8200, 0);",
        "fewer bytes than expected": START + "if (thread == 0) { expect(8192, 1040); line(0, x_ptr, 1024, 8192); }"
        " wait(8192, 0);",
        "half of the threads at a named barrier": "if (thread < 64) meet(1, 128);",
    },
    "more arrivals at a barrier": {
        "two arrivals in place of one": START + "if (thread == 0) { expect(8192, 16); arrive(8192, 1); }",
    },
    "disagree on how many": {"a named barrier's threads": "if (thread < 64) pass(1, 128); else meet(1, 64);"},
    "twice before the others": {"a turn given twice": "if (thread < 32) { pass(1, 128); pass(1, 128); }"},
    "no such named barrier": {"sixteen": "meet(16, 128);", "more than there are": "meet(1, 256);"},
    "overwrites what a product reads": {
        "a copy": START + f"{MULTIPLY} if (thread == 0) {{ {BOX} }} wait(8192, 0); finish();",
        "a store": f"{MULTIPLY} if (thread == 0) store(64, 0); finish();",
    },
    "without a fence": {
        "a copy after a store": START + f"if (thread == 0) {{ store(64, 0); {BOX} }} wait(8192, 0);",
        "a copy after a load": START + f"if (thread == 0) {{ load(y_ptr[0], 64); {BOX} }} wait(8192, 0);",
    },
    "ends before its products": {"no wait": MULTIPLY},
    "where its swizzle does": {
        "a box at 512": START + "if (thread == 0) { expect(8192, 1024); copy4(512, &m, 0, 0, 0, 0, 8192); }",
    },
    "outside of every buffer": {"a line": START + "if (thread == 0) { line(0, x_ptr + 3072, 16, 8192); }"},
    "outside of shared memory": {"a line": START + "if (thread == 0) { line(16368, x_ptr, 32, 8192); }"},
    "misaligned": {"a line": START + "if (thread == 0) { line(0, x_ptr + 1, 16, 8192); }"},
    "whole chunks": {"a line": START + "if (thread == 0) { line(0, x_ptr, 24, 8192); }"},
}


@pytest.mark.parametrize("words, body", [(words, body) for words, bodies in WRONG.items() for body in bodies.values()])
def test_it_says_what_is_wrong(words, body, tmp_path):
    with pytest.raises(RuntimeError, match=words):
        run(tmp_path, body)


@pytest.mark.parametrize("columns", [64, 32, 16])
@pytest.mark.parametrize("begin", [(0, 0, 0, 0), (0, 5, 2, 1), (16, -3, 1, 0), (0, 1, 3, 0), (-8, 1, 0, 2)])
def test_a_box_is_swizzled_and_zero_outside(columns, begin, tmp_path):
    sizes, words = (columns, 8, 3, 2), columns * 8 // 2
    body = (
        START
        + f"""if (thread == 0) {{
      expect(8192, {columns * 16}); copy4(0, &m, {", ".join(map(str, begin))}, 8192);
    }}
    wait(8192, 0);
    for (int i = thread; i < {words}; i += 128) {{ load(y_ptr[i], i * 4); }}"""
    )
    x, y = run(tmp_path, body, sizes=sizes, box=(columns, 8, 1, 1))
    padded = np.pad(x, 16)
    w, z, row, column = (16 + i for i in reversed(begin))
    expected = padded[w, z, row : row + 8, column : column + columns].reshape(8, -1, 8)
    chunks = y[:words].view(np.float16).reshape(8, -1, 8)
    period = columns // 8
    for row in range(8):
        for chunk in range(period):
            np.testing.assert_array_equal(chunks[row, chunk ^ row * period // 8], expected[row, chunk])


def test_what_is_under_way_is_nan(tmp_path):
    """The destination of a copy before it ends, and accumulators before their wait."""
    body = (
        START
        + f"""if (thread == 0) {{ {BOX} load(y_ptr[0], 0); }}
    wait(8192, 0);
    __syncthreads();
    load(y_ptr[1], 0);
    {MULTIPLY} y_ptr[64 + thread] = f[0] != f[0]; finish(); y_ptr[256 + thread] = f[0] != f[0];"""
    )
    x, y = run(tmp_path, body)
    assert y[0] == 0xFFFFFFFF and y[1] == x.view(np.uint32).flat[0]
    assert y[64:192].all() and not y[256:288].any()  # the first warp's, whose rows 0 to 7 are there
