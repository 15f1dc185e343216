"""Rotary position embedding of q and k on CUDA (sm_80 and up), in LLaMA's form: it rotates the halves of a head.

    out[d]       = x[d] cos[d]             - x[d + D/2] sin[d]               for d < D/2
    out[d + D/2] = x[d + D/2] cos[d + D/2] + x[d] sin[d + D/2]

q and k are read where a projection left them, packed or apart, and written in the layout that attention reads: no
transpose, no copy.  A thread rotates the same two vectors of several heads, because these share cosines and sines.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional
from tir_kernels.cuda.ptx import element
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.problem import DTYPES
from tir_kernels.fusion.rows.cost import ELEMENT_BYTES, predict_bytes_us
from tir_kernels.fusion.rows.geometry import MAX_INT32
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import VECTOR, load_vector, store_vector, vector_words
from tir_kernels.template import Operands

NAME = "row-rotary"
TARGET_KIND = "cuda"
LAYOUTS = ("bshd", "bhsd")
RESIDENT_THREADS = 1024  # of a multiprocessor


@dataclass(frozen=True)
class RotaryProblem:
    """Rotation of `heads` query and `kv_heads` key heads of `length` tokens in each of `batch` sequences.

    Arguments in order: the projection (batch, length, packed_heads, head_dim) with the query heads first and the key
    heads next; or, if `packed_heads` is None, q (batch, length, heads, head_dim) and k (batch, length, kv_heads,
    head_dim); then cos and sin (table_batch, length, head_dim), `table_batch` 1 or batch; then q_out and k_out in
    `out_layout`.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    packed_heads: int | None = None
    table_batch: int = 1
    table_dtype: str = "float32"
    out_layout: str = "bshd"

    def __post_init__(self):
        for name in ("dtype", "table_dtype"):
            if getattr(self, name) not in DTYPES:
                raise UnsupportedError(f"{name}={getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
        if self.out_layout not in LAYOUTS:
            raise InputError(f"out_layout={self.out_layout!r} must be 'bshd' or 'bhsd'")
        if self.table_batch not in (1, self.batch):
            raise InputError(f"table_batch={self.table_batch} must be 1 or batch={self.batch}")
        if self.packed_heads is not None and self.packed_heads < self.heads + self.kv_heads:
            raise InputError(f"packed_heads={self.packed_heads} holds fewer than {self.heads} + {self.kv_heads} heads")

    @property
    def source_shapes(self) -> list[tuple[int, ...]]:
        """Shape of the projection that holds q and k, or the shapes of q and of k."""
        counts = (self.heads, self.kv_heads) if self.packed_heads is None else (self.packed_heads,)
        return [(self.batch, self.length, count, self.head_dim) for count in counts]

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """(table_batch, length, head_dim), of cos and of sin."""
        return self.table_batch, self.length, self.head_dim

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of q_out and k_out."""
        if self.out_layout == "bshd":
            return [(self.batch, self.length, count, self.head_dim) for count in (self.heads, self.kv_heads)]
        return [(self.batch, count, self.length, self.head_dim) for count in (self.heads, self.kv_heads)]


    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        sources = [(shape, self.dtype) for shape in self.source_shapes]
        return [*sources, *[(self.table_shape, self.table_dtype)] * 2]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [(shape, self.dtype) for shape in self.out_shapes]


@dataclass(frozen=True)
class RotaryConfig:
    """Threads of a CTA, and heads that each thread works on."""

    threads: int
    heads_per_thread: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "128 threads 4 heads"."""
        return f"{self.threads} threads {self.heads_per_thread} heads"


Config = RotaryConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, RotaryProblem):
        return "it is no rotary embedding"
    if problem.head_dim % (2 * VECTOR):
        return f"head_dim={problem.head_dim} must be a multiple of {2 * VECTOR}: halves are read 16 bytes at a time"
    largest = max(problem.packed_heads or 0, problem.heads, problem.kv_heads)
    if problem.batch * problem.length * largest * problem.head_dim > MAX_INT32:
        return f"{problem.source_shapes[0]} is 2^31 elements or more; indices are 32-bit"
    return None


def configs(problem: RotaryProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration; the default first."""
    heads = problem.heads + problem.kv_heads
    threads = problem.batch * problem.length * heads * problem.head_dim // (2 * VECTOR)
    # One head a thread while all threads run at once.
    few = threads <= RESIDENT_THREADS * gpu_of(target).multiprocessors
    return [Config(256, some) for some in ((1, 2, 4) if few else (2, 4, 1)) if some <= heads]


def predict_us(problem: RotaryProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    per_token = 2 * (problem.heads + problem.kv_heads) * problem.head_dim * ELEMENT_BYTES[problem.dtype]
    tables = 2 * problem.table_batch * problem.length * problem.head_dim * ELEMENT_BYTES[problem.table_dtype]
    return predict_bytes_us(problem.batch * problem.length * per_token + tables, target)


def operands(
    problem: RotaryProblem, config: Config, target: tvm.target.Target, mask: None = None
) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: RotaryProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments as RotaryProblem lists them."""
    dtype, table_dtype, half = problem.dtype, problem.table_dtype, problem.head_dim // 2
    heads, total = problem.heads, problem.heads + problem.kv_heads
    load, load_table, store = load_vector(dtype), load_vector(table_dtype), store_vector(dtype)
    # Pairs of vectors in a head; threads that share a token's heads.
    pairs, slots = half // VECTOR, -(-total // config.heads_per_thread)
    items = problem.batch * problem.length * slots * pairs
    ctas = -(-items // config.threads)

    def out_pointer(buffer, b, s, head, d):
        index = (b, s, head) if problem.out_layout == "bshd" else (b, head, s)
        return lambda i: buffer.ptr_to([*index, d + i])

    @T.inline
    def load_head(words, q, k, b, s, head, d):
        if problem.packed_heads is not None:
            load(words, 0, lambda i: q.ptr_to([b, s, head, d + i]))
        elif head < heads:
            load(words, 0, lambda i: q.ptr_to([b, s, head, d + i]))
        else:
            load(words, 0, lambda i: k.ptr_to([b, s, head - heads, d + i]))

    @T.inline
    def turn(values, x, other, cos, sin, sign):
        for i in T.unroll(VECTOR):
            turned = T.meta_var(element(other, 0, i, dtype) * element(sin, 0, i, table_dtype))
            values[i] = element(x, 0, i, dtype) * element(cos, 0, i, table_dtype) + T.float32(sign) * turned

    @T.inline
    def store_head(values, q_out, k_out, b, s, head, d):
        if head < heads:
            store(out_pointer(q_out, b, s, head, d), values)
        elif head < total:
            store(out_pointer(k_out, b, s, head - heads, d), values)

    def work(q, k, cos, sin, q_out, k_out, b, s, slot, d):
        """Rotate heads slot, slot + slots, … of a token; for heads past the end, read the last and write nothing."""
        table_row = b if problem.table_batch > 1 else 0
        table_size, size = vector_words(table_dtype), vector_words(dtype)
        starts = (d, d + half)
        tables = []
        for name, table in (("cos", cos), ("sin", sin)):
            tables.append(local_buffers(f"{name}_words", 2, table_size, "uint32"))
            for words, start in zip(tables[-1], starts):
                load_table(words, 0, lambda i: table.ptr_to([table_row, s, start + i]))
        found = [slot + j * slots for j in range(config.heads_per_thread)]
        words = [local_buffers(f"words{j}_", 2, size, "uint32") for j in range(config.heads_per_thread)]
        for head, halves in zip(found, words):
            for part, start in zip(halves, starts):
                load_head(part, q, k, b, s, T.min(head, total - 1), start)
        (values,) = local_buffers("values", 1, VECTOR, "float32")
        for head, (low, high) in zip(found, words):
            turn(values, low, high, tables[0][0], tables[1][0], -1.0)
            store_head(values, q_out, k_out, b, s, head, starts[0])
            turn(values, high, low, tables[0][1], tables[1][1], 1.0)
            store_head(values, q_out, k_out, b, s, head, starts[1])

    @T.jit(private=True)
    def kernel(
        q_handle: T.handle,
        k_handle: T.Optional(T.handle),
        cos_handle: T.handle,
        sin_handle: T.handle,
        q_out_handle: T.handle,
        k_out_handle: T.handle,
    ):
        q = T.match_buffer(q_handle, problem.source_shapes[0], dtype, align=16)
        k = T.meta_var(match_optional("k", k_handle, problem.source_shapes[-1], dtype, align=16))
        cos = T.match_buffer(cos_handle, problem.table_shape, table_dtype, align=16)
        sin = T.match_buffer(sin_handle, problem.table_shape, table_dtype, align=16)
        q_out = T.match_buffer(q_out_handle, problem.out_shapes[0], dtype, align=16)
        k_out = T.match_buffer(k_out_handle, problem.out_shapes[1], dtype, align=16)

        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([config.threads])
        item = cta * config.threads + thread
        token = item // (slots * pairs)
        b = token // problem.length
        s = token % problem.length
        slot = item // pairs % slots
        d = item % pairs * VECTOR
        if item < items:
            work(q, k, cos, sin, q_out, k_out, b, s, slot, d)

    absent = [] if problem.packed_heads is None else ["k_handle"]
    return finished(kernel, f"row_rotary_{config.threads}x{config.heads_per_thread}", absent)
