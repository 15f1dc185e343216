"""Device code of the CUDA block-wise kernel that multiplies by wgmma (sm_90a): four warps, 64 rows an instruction.

Queries and probabilities are operands in registers, in the very fragments of mma.sync; keys and values are read from
shared memory through descriptors.  Accumulators lie in the lanes as those of mma.sync do, so that all other device code
is shared.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.cuda_geometry import Geometry, PanelTile
from tir_kernels.attention.cuda_tile import SHORT, matrix_products

GROUP_BYTES = 1024  # 8 rows of 128 bytes, after which the swizzle repeats
SWIZZLE_128 = 1 << 62
STEP = 16  # depth of one instruction


def _pin(name: str, kind: str, constraint: str) -> tuple[str, str]:
    """A device function that does nothing to a register but hold its uses in their order, and its source."""
    body = f'asm volatile("" : "+{constraint}"(x));'
    return name, f"__forceinline__ __device__ void {name}({kind}& x) {{\n  {body}\n}}\n"


PIN_FLOAT = _pin("pin_float", "float", "f")
PIN_WORD = _pin("pin_word", "unsigned int", "r")


def warpgroup_products(g: Geometry):
    """What `cuda_tile.matrix_products` gives, for a warpgroup; addresses of keys and values are their tiles'."""
    row_tiles, score_tiles, value_tiles, query_steps = g.row_tiles, g.score_tiles, g.value_tiles, g.query_steps
    dtype = SHORT[g.problem.dtype]
    pack_instruction = f"cvt.rn.{dtype}x2.f32"
    fragments = matrix_products(g)

    def instruction(columns):
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{dtype}.{dtype}"

    def descriptor(tile: PanelTile, address):
        """Of a matrix that starts at a shared address; panels along the head are the leading dimension."""
        fixed = tile.panel_bytes // 16 << 16 | GROUP_BYTES // 16 << 32 | SWIZZLE_128
        return T.uint64(fixed) + T.cast(address // 16, "uint64")

    def b_address(tile, start, lane):
        return start

    def v_address(start, lane):
        return start

    @T.inline
    def pin(registers, n, function, source):
        """The compiler may not carry a use of the registers across this point, as across a wait."""
        for i in T.unroll(n):
            T.cuda.func_call(function, registers[i], source_code=source)

    @T.inline
    def finish():
        T.ptx["wgmma.commit_group.sync.aligned"]()
        T.ptx["wgmma.wait_group.sync.aligned"](0)

    @T.inline
    def multiply(c, ci, n, a, ai, tile, address, accumulate, transposed):
        T.ptx[instruction(n * 2)](
            *[c[ci + i] for i in range(n)],
            a[ai], a[ai + 1], a[ai + 2], a[ai + 3],
            descriptor(tile, address), T.bool(accumulate), 1, 1, transposed,
        )  # fmt: skip

    @T.inline
    def multiply_qk(s, q, q_address, k_address):
        """s = q kᵀ; s holds (row_tiles, score_tiles, 4), q's fragments (row_tiles, query_steps, 4) words."""
        T.ptx["wgmma.fence.sync.aligned"]()
        for step in T.unroll(query_steps):
            for tile in T.unroll(row_tiles):
                multiply(
                    s, tile * score_tiles * 4, score_tiles * 4, q, (tile * query_steps + step) * 4,
                    g.k_tile, k_address + g.k_tile.offset(0, 2 * step), step > 0, 0,
                )  # fmt: skip
        finish()
        pin(s, row_tiles * score_tiles * 4, *PIN_FLOAT)

    @T.inline
    def multiply_pv(o, s, v_address):
        """o += p v, with p = s rounded to the inputs' dtype; o holds (row_tiles, value_tiles, 4)."""
        p = T.alloc_local([row_tiles * score_tiles * 2], "uint32")
        for i in T.unroll(row_tiles * score_tiles * 2):
            T.ptx[pack_instruction](p[i], s[2 * i + 1], s[2 * i])
        pin(p, row_tiles * score_tiles * 2, *PIN_WORD)
        pin(o, row_tiles * value_tiles * 4, *PIN_FLOAT)
        T.ptx["wgmma.fence.sync.aligned"]()
        for step in T.unroll(score_tiles // 2):
            for tile in T.unroll(row_tiles):
                multiply(
                    o, tile * value_tiles * 4, value_tiles * 4, p, tile * score_tiles * 2 + step * 4,
                    g.v_tile, v_address + step * (STEP * g.v_tile.pitch), True, 1,
                )  # fmt: skip
        finish()
        pin(o, row_tiles * value_tiles * 4, *PIN_FLOAT)

    return SimpleNamespace(
        a_address=fragments.a_address,
        b_address=b_address,
        v_address=v_address,
        load_all_q=fragments.load_all_q,
        multiply_qk=multiply_qk,
        multiply_pv=multiply_pv,
    )
