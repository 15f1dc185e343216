"""Embeddings on CUDA (sm_80 and up): rows gathered from one table or several, their sum, and a norm of the sum.

    x = table0[index0] + table1[index1] + …       float32
    out_sum = x                                   where the problem keeps it
    out = norm(x)                                 where there is one

BERT's words, positions and types are three tables.  Rows are read as the row-norm kernel reads its own.
"""

import math
from dataclasses import dataclass

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional
from tir_kernels.errors import InputError
from tir_kernels.fusion.problem import Norm, RowProblem
from tir_kernels.fusion.rows.cost import ELEMENT_BYTES, predict_bytes_us
from tir_kernels.fusion.rows.device import decode_vector, row_of_thread, row_work, vector_loads
from tir_kernels.fusion.rows.geometry import MAX_INT32, VECTOR, RowConfig, RowGeometry, refusal, row_configs
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import vector_words
from tir_kernels.template import Operands

NAME = "row-embedding"
TARGET_KIND = "cuda"
Config = RowConfig
MAX_TABLES = 3


@dataclass(frozen=True)
class Table:
    """An embedding's table of `rows` rows.

    It has one index for each row of the output, or `period` indices that repeat, as positions do for each sequence of a
    batch.
    """

    rows: int
    period: int | None = None


@dataclass(frozen=True)
class EmbeddingProblem:
    """Sum of rows of tables, for each of m tokens, and a norm.

    Arguments in order: indices and table (rows, n) of each table, the norm's weight and bias, then out (m, n) and,
    where `keeps_sum`, out_sum.  A row whose index lies outside its table is NaN.
    """

    m: int
    n: int
    dtype: str
    tables: tuple[Table, ...]
    index_dtype: str = "int64"
    norm: Norm | None = None
    keeps_sum: bool = False

    def __post_init__(self):
        if self.index_dtype not in ("int32", "int64"):
            raise InputError(f"index_dtype={self.index_dtype!r} must be 'int32' or 'int64'")
        if not self.tables:
            raise InputError("tables=() must hold one at least")
        for table in self.tables:
            if table.period is not None and self.m % table.period:
                raise InputError(f"period={table.period} must divide m={self.m}")
        _ = self.of_sum

    @property
    def of_sum(self) -> RowProblem:
        """The problem whose source is the sum of the tables' rows."""
        return RowProblem(self.m, self.n, self.dtype, (), self.norm, self.keeps_sum)

    def index_shape(self, i: int) -> tuple[int]:
        """Shape of the indices of table i: (period,), or (m,) where it has no period."""
        return (self.tables[i].period or self.m,)

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        found = []
        for i, table in enumerate(self.tables):
            found += [(self.index_shape(i), self.index_dtype), ((table.rows, self.n), self.dtype)]
        return found + [(shape, self.dtype) for shape in self.of_sum.operand_shapes]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return self.of_sum.outputs


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, EmbeddingProblem):
        return "it gathers no rows"
    if len(problem.tables) > MAX_TABLES:
        return f"{len(problem.tables)} tables, more than {MAX_TABLES}"
    for table in problem.tables:
        if table.rows * problem.n > MAX_INT32:
            return f"a table of {table.rows} rows of {problem.n} is 2^31 elements or more; indices are 32-bit"
    return refusal(problem.m, problem.n)


def configs(problem: EmbeddingProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers; the default first."""
    return row_configs(problem.m, problem.n, gpu_of(target), gathers=True)


def predict_us(problem: EmbeddingProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel; rows that are read several times come from the cache after the first."""
    rows = sum(min(table.rows, table.period or problem.m) for table in problem.tables)
    elements = (rows + problem.m * (1 + problem.keeps_sum)) * problem.n
    elements += sum(map(math.prod, problem.of_sum.operand_shapes))
    indices = sum(problem.index_shape(i)[0] for i in range(len(problem.tables)))
    return predict_bytes_us(elements * ELEMENT_BYTES[problem.dtype] + indices * 8, target)


def operands(problem: EmbeddingProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: EmbeddingProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments as EmbeddingProblem lists them."""
    g = RowGeometry(problem.m, problem.n, config)
    work = row_work(g, problem.of_sum)
    load_row, _ = vector_loads(g, problem.dtype)
    decode = decode_vector(problem.dtype)
    shape, dtype, norm = (problem.m, problem.n), problem.dtype, problem.norm
    index_shapes = [problem.index_shape(i) for i in range(len(problem.tables))]
    table_shapes = [(table.rows, problem.n) for table in problem.tables]

    def match_given(name, handles, shapes, kind):
        """Buffers of the handles that are not absent."""
        present = [handle for handle in handles if handle is not None]
        return [
            IRBuilder.name(f"{name}{i}", T.match_buffer(handle, shape, kind, align=16))
            for i, (handle, shape) in enumerate(zip(present, shapes))
        ]

    @T.inline
    def add(values, other):
        for i in T.unroll(VECTOR):
            values[i] = values[i] + other[i]

    @T.inline
    def make_nan(values, where):
        for i in T.unroll(VECTOR):
            values[i] = T.Select(where, T.float32("nan"), values[i])

    def take(r, words, row, row_lane, indices, tables):
        """r.values = the sum of the tables' rows; all of them are read before the first is used."""
        outside = []
        for i, (index, table) in enumerate(zip(indices, tables)):
            period = problem.tables[i].period
            chosen = index[row if period is None else row % period]
            outside.append(T.Or(chosen < 0, chosen >= problem.tables[i].rows))
            load_row(words[i], table, T.cast(T.max(T.min(chosen, problem.tables[i].rows - 1), 0), "int32"), row_lane)
        (other,) = local_buffers("other", 1, VECTOR, "float32")
        for v, values in enumerate(r.values):
            decode(values, words[0][v])
            for some in words[1:]:
                decode(other, some[v])
                add(values, other)
            for where in outside:
                make_nan(values, where)

    def all_words():
        size = g.vectors_per_thread, vector_words(dtype), "uint32"
        return [local_buffers(f"words{i}_", *size) for i in range(len(problem.tables))]

    @T.jit(private=True)
    def kernel(
        index0: T.handle,
        table0: T.handle,
        index1: T.Optional(T.handle),
        table1: T.Optional(T.handle),
        index2: T.Optional(T.handle),
        table2: T.Optional(T.handle),
        weight_handle: T.Optional(T.handle),
        bias_handle: T.Optional(T.handle),
        out_handle: T.handle,
        sum_handle: T.Optional(T.handle),
    ):
        indices = T.meta_var(match_given("index", (index0, index1, index2), index_shapes, problem.index_dtype))
        tables = T.meta_var(match_given("table", (table0, table1, table2), table_shapes, dtype))
        operands = T.meta_var(match_given("operand", (weight_handle, bias_handle), [(problem.n,)] * 2, dtype))
        out = T.match_buffer(out_handle, shape, dtype, align=16)
        out_sum = T.meta_var(match_optional("out_sum", sum_handle, shape, dtype, align=16))

        T.device_entry()
        row, row_read, row_lane, slot = T.meta_var(row_of_thread(g))
        r = T.meta_var(work.registers())
        words = T.meta_var(all_words())

        work.fetch(r, operands, row_read, row_lane)
        take(r, words, row_read, row_lane, indices, tables)
        work.finish(r, row, row_lane, slot, out, out_sum)

    given = {
        "index1": len(problem.tables) > 1,
        "table1": len(problem.tables) > 1,
        "index2": len(problem.tables) > 2,
        "table2": len(problem.tables) > 2,
        "weight_handle": norm is not None and norm.weight,
        "bias_handle": norm is not None and norm.bias,
        "sum_handle": problem.keeps_sum,
    }
    absent = [name for name, is_given in given.items() if not is_given]
    return finished(kernel, f"row_embedding_{config.threads_per_row}x{config.rows_per_cta}", absent)
