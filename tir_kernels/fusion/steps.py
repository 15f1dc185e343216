"""Device code of elementwise steps on CUDA: a thread's vector of 8 neighbours in a row, in float32 registers.

The functions are inlined into a kernel while it is parsed.  Operands are read 16 bytes at a time, ahead of their use:
a vector (n,) once for all rows that a thread works on, a matrix (m, n) for each of them.
"""

import functools
import math
from types import SimpleNamespace

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda.float32 import functions
from tir_kernels.cuda.ptx import element
from tir_kernels.fusion.problem import Step

VECTOR = 8  # elements of a row that a thread works on together
LOG2E = math.log2(math.e)
# log2(erfc(z / √2) / 2) as a polynomial of z ≥ 0, highest power first: a least-squares fit on [0, 5.5], weighted until
# the largest errors were equal.  There 2^polynomial is accurate to 1.1e-5; beyond 5.5 it keeps falling.
LOG2_HALF_ERFC = (
    -1.63009804e-06,
    5.82054272e-05,
    -9.09677765e-04,
    8.45105667e-03,
    -5.39005324e-02,
    -4.58460450e-01,
    -1.15128338,
    -9.99987483e-01,
)


EXACT = {"gelu": functions.gelu, "tanh": functions.tanh}  # of the activations that are right to half precision only


class Words:
    """A view of a buffer of registers that begins at element `first`."""

    def __init__(self, words, first: int):
        self.words, self.first = words, first

    def __getitem__(self, i):
        return self.words[self.first + i]


def vector_words(dtype: str) -> int:
    """32-bit words of a vector in memory."""
    return VECTOR if dtype == "float32" else VECTOR // 2


def match_operands(handles, operands) -> list:
    """Buffers of the handles that a kernel got for `problem.operands`, named operand0, operand1, …"""
    pairs = enumerate(zip(handles, operands))
    return [IRBuilder.name(f"operand{i}", T.match_buffer(h, *operand, align=16)) for i, (h, operand) in pairs]


def load_vector(dtype: str, cache: str = "nc"):
    """`load(words, at, pointer)`: load 8 elements to words[at…].

    `cache` is "nc" for memory that the kernel only reads, "cg" for what other CTAs wrote.
    """
    instruction = "ld.global.nc.v4.b32" if cache == "nc" else f"ld.global.{cache}.v4.b32"

    @T.inline
    def load(words, at, pointer):
        for i in T.unroll(vector_words(dtype) // 4):
            T.ptx[instruction](
                words[at + 4 * i],
                words[at + 4 * i + 1],
                words[at + 4 * i + 2],
                words[at + 4 * i + 3],
                pointer(i * (VECTOR // 2)),
            )

    return load


def pack_vector(dtype: str):
    """`pack(packed, values)`: pack 8 float32 values into 4 words of half precision."""
    instruction = "cvt.rn.bf16x2.f32" if dtype == "bfloat16" else "cvt.rn.f16x2.f32"

    @T.inline
    def pack(packed, values):
        for i in T.unroll(4):
            T.ptx[instruction](packed[i], values[2 * i + 1], values[2 * i])

    return pack


def store_vector(dtype: str):
    """`store(pointer, values)`: store 8 float32 values as `dtype`; `pointer(i)` is the address of element i."""
    pack = pack_vector(dtype)

    @T.inline
    def store(pointer, values):
        if dtype == "float32":
            for i in T.unroll(2):
                T.ptx["st.global.v4.f32"](
                    pointer(4 * i), values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]
                )
        else:
            packed = T.alloc_local([4], "uint32")
            pack(packed, values)
            T.ptx["st.global.v4.b32"](pointer(0), packed[0], packed[1], packed[2], packed[3])

    return store


@functools.cache
def operand_words(steps: tuple[Step, ...], dtype: str) -> tuple[int, int]:
    """Registers that a vector's operands need: (for operands that are vectors (n,), for those that are matrices)."""
    size = vector_words(dtype)
    rows = sum(step.operand == "row" for step in steps)
    matrices = sum(step.operand in ("matrix", "normed") for step in steps)
    return size * rows, size * matrices


def step_functions(steps: tuple[Step, ...], dtype: str, first_operand: int = 0):
    """Functions that load the operands of `steps` and apply the steps, in their order.

    fetch_rows(row_words, operands, column)              load operands that are vectors, for a thread's columns
    prefetch_matrices(operands, row, column)             prefetch operands that are matrices to the L2 cache
    fetch_matrices(words, at, operands, row, column)     load operands that are matrices to words[at…]
    apply(values, row_words, words, at, pair, norm_words)     apply the steps to float32 values[8], in place

    `row_words` has `row_size` words, `words` has `matrix_size` for each vector that is fetched ahead; `operands` are
    the buffers, from `first_operand` on in the order of the steps.  If a step has a normed operand, the kernel itself
    fetches `pair`, the scale and the shift of the operand's row, and `norm_words`, 8 elements of each of the two
    vectors of its columns.
    """
    size = vector_words(dtype)
    load = load_vector(dtype)

    @T.inline
    def no_fetch_rows(row_words, operands, column):
        pass

    @T.inline
    def no_prefetch(operands, row, column):
        pass

    @T.inline
    def no_fetch_matrices(words, at, operands, row, column):
        pass

    @T.inline
    def no_steps(values, row_words, words, at, pair=None, norm_words=None):
        pass

    fetch_rows, fetch_matrices, apply, prefetch = no_fetch_rows, no_fetch_matrices, no_steps, no_prefetch
    row_size, matrix_size = operand_words(steps, dtype)
    operand, row_place, matrix_place = first_operand, 0, 0
    for step in steps:
        if step.operand == "row":
            fetch_rows = _then_fetch_row(fetch_rows, load, operand, row_place)
            apply = _then_step(apply, step, row_place, dtype)
            row_place += size
        elif step.operand is not None:
            fetch_matrices = _then_fetch_matrix(fetch_matrices, load, operand, matrix_place)
            prefetch = _then_prefetch(prefetch, operand)
            then = _then_step if step.norm is None else _then_add_normed
            apply = then(apply, step, matrix_place, dtype)
            matrix_place += size
        else:
            apply = _then_step(apply, step, 0, dtype)
        operand += n_operands(step)
    return SimpleNamespace(
        row_size=row_size,
        matrix_size=matrix_size,
        fetch_rows=fetch_rows,
        prefetch_matrices=prefetch,
        fetch_matrices=fetch_matrices,
        apply=apply,
    )


def load_words(steps: tuple[Step, ...], kind: str, first_operand: int = 0):
    """`load(words, at, operands, pointer)`: load a word of each operand of a kind, "row" or "matrix".

    For accumulators in the layout of an mma: two neighbours of a row are a word, and 8 of them, in two rows and two
    n8 tiles, are finished as one vector.  So the words of an operand lie half a vector apart.
    """

    @T.inline
    def load(words, at, operands, pointer):
        pass

    of_kind = [i for i, operand in enumerate(s.operand for s in steps if s.operand is not None) if operand == kind]
    for number, operand in enumerate(of_kind):
        load = _then_load(load, number * (VECTOR // 2), first_operand + operand)
    return load


def _then_load(before, number: int, operand: int):
    @T.inline
    def load(words, at, operands, pointer):
        before(words, at, operands, pointer)
        T.ptx["ld.global.nc.b32"](words[at + number], pointer(operands[operand]))

    return load


def n_operands(step: Step) -> int:
    """Number of operands of a step; a normed operand counts as three: matrix, statistics and columns."""
    return int(step.operand is not None) + 2 * (step.norm is not None)


def _then_fetch_row(before, load, operand: int, first_word: int):
    @T.inline
    def fetch(row_words, operands, column):
        before(row_words, operands, column)
        load(row_words, first_word, lambda i: operands[operand].ptr_to([column + i]))

    return fetch


def _then_prefetch(before, operand: int):
    @T.inline
    def prefetch(operands, row, column):
        before(operands, row, column)
        T.ptx["prefetch.global.L2"](operands[operand].ptr_to([row, column]))

    return prefetch


def _then_fetch_matrix(before, load, operand: int, first_word: int):
    @T.inline
    def fetch(words, at, operands, row, column):
        before(words, at, operands, row, column)
        load(words, at + first_word, lambda i: operands[operand].ptr_to([row, column + i]))

    return fetch


def _then_step(before, step: Step, first_word: int, dtype: str):
    """The steps before, then one more."""
    if step.operand is None:
        function = activation(step, dtype)

        @T.inline
        def apply(values, row_words, words, at, pair=None, norm_words=None):
            before(values, row_words, words, at, pair, norm_words)
            for i in T.unroll(VECTOR):
                values[i] = function(values[i])

        return apply

    def operand_of(row_words, words, at, i):
        if step.operand == "row":
            return element(row_words, first_word, i, dtype)
        return element(words, at + first_word, i, dtype)

    @T.inline
    def apply_binary(values, row_words, words, at, pair=None, norm_words=None):
        before(values, row_words, words, at, pair, norm_words)
        for i in T.unroll(VECTOR):
            if step.kind == "add":
                values[i] = values[i] + operand_of(row_words, words, at, i)
            else:
                values[i] = values[i] * operand_of(row_words, words, at, i)

    return apply_binary


def _then_add_normed(before, step: Step, first_word: int, dtype: str):
    """The steps before, then a normed operand is added."""

    @T.inline
    def apply(values, row_words, words, at, pair=None, norm_words=None):
        before(values, row_words, words, at, pair, norm_words)
        for i in T.unroll(VECTOR):
            normed = T.meta_var(element(words, at + first_word, i, dtype) * pair[0] + pair[1])
            values[i] = normed * element(norm_words, 0, i, "float32") + (
                values[i] + element(norm_words, VECTOR, i, "float32")
            )

    return apply


def activation(step: Step, dtype: str = "float16"):
    """A step without an operand as a function of a float32 expression, which it may repeat.

    All are made of 2^x and division, which fast math turns into instructions of nearly full accuracy; the hardware's
    own tanh is no better than half precision.  For a `dtype` of float32, gelu and tanh are right to its accuracy.
    """
    if dtype == "float32" and step.kind in EXACT:
        return EXACT[step.kind]
    one, value = T.float32(1), 0.0 if step.value is None else step.value

    def logistic(x, factor=1.0):
        """1 / (1 + exp(-factor x)); exact in both tails."""
        return one / (one + T.exp2(x * T.float32(-LOG2E * factor)))

    def gelu(x):
        """max(x, 0) - |x| erfc(|x| / √2) / 2: nothing cancels for large |x|.

        It needs one special function; erfc's usual forms need three.  A multiprocessor has so few units for them that
        three would take longer than all the rest of an epilogue.
        """
        exponent = T.float32(LOG2_HALF_ERFC[0])
        for coefficient in LOG2_HALF_ERFC[1:]:
            exponent = exponent * T.abs(x) + T.float32(coefficient)
        return T.max(x, T.float32(0)) - T.abs(x) * T.exp2(exponent)

    def gelu_tanh(x):
        """x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)) with y = √(2/π) (x + 0.044715 x³)."""
        return x * logistic(x * (one + x * x * T.float32(0.044715)), 2 * math.sqrt(2 / math.pi))

    # relu and clip compare, and comparisons with NaN are false, so NaN stays; min and max would turn it into a number.
    def relu(x):
        return T.Select(x < T.float32(0), T.float32(0), x)

    def clip(x):
        top, bottom = T.float32(value), T.float32(-value)
        return T.Select(x > top, top, T.Select(x < bottom, bottom, x))

    return {
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "relu": relu,
        "silu": lambda x: x * logistic(x),
        "tanh": lambda x: T.float32(2) * logistic(x, 2.0) - one,
        "sigmoid": logistic,
        "scale": lambda x: x * T.float32(value),
        "clip": clip,
    }[step.kind]
