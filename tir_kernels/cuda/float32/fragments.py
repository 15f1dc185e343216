"""Device code that multiplies float32 fragments on tensor cores: mma.m16n8k8, whose operands are tf32.

A tf32 number has float32's exponent and 10 bits of mantissa.  With "tf32", operands are rounded to it and multiplied
once.  With "ieee", each product is three:

    a = big + small                       big is a's first 11 bits, small the others, rounded to tf32
    a * b ≈ a_big * b_big + a_big * b_small + a_small * b_near                  b_near is b rounded to tf32

What is left out, a_small * (b - b_near), is at most 2^-22 of the product and has either sign.  The three are summed on
their own and then added to the accumulators by float32 additions, because tensor cores cut off what an addition rounds.

big is cut off, not rounded, so all parts of a number have its sign: where a product is infinite, no other part is
infinite with the opposite sign.  An infinite number is the largest tf32 number and an infinite small part, NaN has a
small part of NaN: both give what they give in IEEE arithmetic.  The two largest numbers, of magnitudes from
(1 - 2^-23) * 2^128 on, round to infinity.  Subnormal numbers take part, with steps of 2^-136.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

LARGEST = float.fromhex("0x1.ffcp127")  # of tf32: its bits are 0x7f7fe000
TF32_BITS = 0xFFFFE000  # of a float32 that a tf32 has
HALF_TF32_STEP = 0x1000
IN_FLIGHT, IN_FLIGHT_OF_MANY = 4, 1  # fragments of c that a warp works on at the same time
MANY = 24  # fragments of c: more leave few registers
MMA = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"


def in_turn(mode: str, rows: int, columns: int):
    """`wait(c, n, address)`: 0, int32, but known only when an earlier column of c is; c holds (rows, columns, 4).

    The column is the one that was computed before the `in_flight` fragments before column n.  What is added to an
    address, or to the bits of b, makes column n wait.  Else ptxas works on all columns at once, puts off their
    additions, and has too few registers.  `address` is one of shared memory, which has fewer than 30 bits; ptxas does
    not know that.  In "tf32" nothing is added, so nothing waits.
    """
    in_flight = IN_FLIGHT if rows * columns <= MANY else IN_FLIGHT_OF_MANY
    ahead = min(max(1, in_flight // rows), columns)

    def wait(c, n, address):
        if mode != "ieee":
            return 0
        done = address >> 30
        for i in range(4 * rows):
            done = done & T.reinterpret("int32", c[(i // 4 * columns + (n + columns - ahead) % columns) * 4 + i % 4])
        return done

    return wait


def fragment_products(mode: str):
    """Functions on the fragments of one warp: a (16 × 8) has 4 numbers a lane, b (8 × 8) has 2, c (16 × 8) has 4.

    prepare_a(parts, at, value)      parts[at…], `a_size` words, from the float32 numbers value(0) … value(3)
    prepare_b(parts, at, value)      parts[at…], `b_size` words, from value(0) and value(1)
    multiply(c, ci, a, ai, b, bi)    c[ci…] += a b, of prepared parts
    """
    exact = mode == "ieee"

    @T.inline
    def mma(d, di, a, ai, b, bi, c, ci):
        T.ptx[MMA](
            d[di], d[di + 1], d[di + 2], d[di + 3],
            a[ai], a[ai + 1], a[ai + 2], a[ai + 3], b[bi], b[bi + 1],
            c[ci], c[ci + 1], c[ci + 2], c[ci + 3],
        )  # fmt: skip

    @T.inline
    def split(parts, big, small, near, x):
        """Write the parts of x to parts[big], parts[small] and, unless it is None, parts[near]."""
        finite = T.alloc_local([1], "float32")
        rest = T.alloc_local([1], "float32")
        # Of NaN and a number, min is the number.
        T.ptx["min.f32"](finite[0], x, T.float32(LARGEST))
        T.ptx["max.f32"](finite[0], finite[0], T.float32(-LARGEST))
        if near is not None:  # as cvt.rna.tf32 rounds, without its care for infinities
            parts[near] = (T.reinterpret("uint32", finite[0]) + T.uint32(HALF_TF32_STEP)) & T.uint32(TF32_BITS)
        parts[big] = T.reinterpret("uint32", finite[0]) & T.uint32(TF32_BITS)
        T.ptx["sub.rn.f32"](rest[0], x, T.reinterpret("float32", parts[big]))
        T.ptx["cvt.rna.tf32.f32"](parts[small], rest[0])

    @T.inline
    def prepare_a(parts, at, value):
        for i in T.unroll(4):
            if exact:
                split(parts, at + i, at + 4 + i, None, value(i))
            else:
                T.ptx["cvt.rna.tf32.f32"](parts[at + i], value(i))

    @T.inline
    def prepare_b(parts, at, value):
        for i in T.unroll(2):
            if exact:
                split(parts, at + i, at + 2 + i, at + 4 + i, value(i))
            else:
                T.ptx["cvt.rna.tf32.f32"](parts[at + i], value(i))

    @T.inline
    def multiply(c, ci, a, ai, b, bi):
        if exact:
            total = T.alloc_local([4], "float32")
            for i in T.unroll(4):
                total[i] = T.float32(0)
            mma(total, 0, a, ai + 4, b, bi + 4, total, 0)
            mma(total, 0, a, ai, b, bi + 2, total, 0)
            mma(total, 0, a, ai, b, bi, total, 0)
            for i in T.unroll(4):
                c[ci + i] = c[ci + i] + total[i]
        else:
            mma(c, ci, a, ai, b, bi, c, ci)

    return SimpleNamespace(
        prepare_a=prepare_a,
        prepare_b=prepare_b,
        multiply=multiply,
        a_size=8 if exact else 4,
        b_size=6 if exact else 2,
    )
