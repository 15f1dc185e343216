"""Rotary position embedding of q and k."""

from tvm import te, tirx

from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.problems.fusion_compute import as_float
from tir_kernels.problems.kind import Random, titled

PROBLEM, PARTS = RotaryProblem, ()


def sizes(problem: RotaryProblem) -> dict[str, int]:
    """Sequences, tokens, query heads and their size."""
    return {name: getattr(problem, name) for name in ("batch", "length", "heads", "head_dim")}


def title(problem: RotaryProblem) -> str:
    """As "rotary 2x128x12x64"."""
    return titled("rotary", sizes(problem))


def tensors(problem: RotaryProblem) -> list[te.Tensor]:
    """The projection or q and k, cos, sin, out (of q), k_out."""
    sources = [te.placeholder(shape, problem.dtype, name=f"x{i}") for i, shape in enumerate(problem.source_shapes)]
    tables = [te.placeholder(problem.table_shape, problem.table_dtype, name=name) for name in ("cos", "sin")]
    is_packed = problem.packed_heads is not None
    parts = [(sources[0], 0), (sources[0], problem.heads) if is_packed else (sources[1], 0)]
    outputs = [
        te.compute(shape, _turned(problem, *part, tables), name=name)
        for part, shape, name in zip(parts, problem.out_shapes, ("out", "k_out"))
    ]
    return [*sources, *tables, *outputs]


def draw(problem: RotaryProblem, random: Random) -> list:
    """Normal projections, and the cosines and sines of angles."""
    angles = 6.3 * random.uniform(problem.table_shape)
    tables = [random.cast(x, problem.table_dtype) for x in (angles.cos(), angles.sin())]
    return [*(random.normal(shape, problem.dtype) for shape in problem.source_shapes), *tables]


def reference(problem: RotaryProblem, inputs: list, torch, keep: None = None) -> list:
    """[q_out, k_out]."""
    *sources, cos, sin = inputs
    if problem.packed_heads is not None:
        (packed,) = sources
        sources = packed[:, :, : problem.heads + problem.kv_heads].split((problem.heads, problem.kv_heads), 2)
    cos, sin = (table.to(sources[0].dtype)[:, :, None] for table in (cos, sin))

    def turned(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    results = [turned(x) for x in sources]
    return results if problem.out_layout == "bshd" else [x.transpose(1, 2).contiguous() for x in results]


def _turned(problem: RotaryProblem, x: te.Tensor, first_head: int, tables: list[te.Tensor]):
    """The element of q_out or k_out at an index, from the heads of x that begin with `first_head`."""
    half = problem.head_dim // 2

    def element(*index):
        b, s, h, d = index if problem.out_layout == "bshd" else (index[0], index[2], index[1], index[3])
        cos, sin = (as_float(table[b if problem.table_batch > 1 else 0, s, d]) for table in tables)
        other = as_float(x[b, s, first_head + h, (d + half) % problem.head_dim])
        signed = tirx.Select(d < half, -other, other)
        return (as_float(x[b, s, first_head + h, d]) * cos + signed * sin).astype(problem.dtype)

    return element
