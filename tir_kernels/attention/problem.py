"""The definition of what every sparse attention kernel computes, on every target.

    x[b,h,i,j] = scale * sum_d q[b,h,i,d] * k[b,h//g,j,d] + bias[b,h,i,j]      float32, g = q_heads // kv_heads
    o[b,h,i,:] = softmax over {j : the mask keeps (i,j)} of x[b,h,i,:]  @  v[b,h//g,:,:]

With a softcap, the scaled product s becomes softcap * tanh(s / softcap) before the bias is added.

A sink is a logit of each query head.  It adds a term exp(sink[h]) to the softmax's denominator, like one more key that
every row keeps, with the sink as its score and 0 as its value.

A row that the mask empties, or whose every kept score is -inf, gives 0, never NaN.  A finite score takes part as in
PyTorch, however small: a row of only finfo.min averages its values.  A sink of -inf has no effect; a sink of NaN or
+inf makes all rows of its head NaN.  Inputs may be half precision; products accumulate and the softmax runs in float32.

With a key count n, key j takes part only where j < n: other keys have no score, whatever k holds there, and a row
without a key gives 0.  Values of keys that take no part must be finite: a weight of 0 times infinity is NaN.

With positions, the mask is one of (kv_len, kv_len) elements, and query i has the mask's row positions[i].  A negative
position counts from the end.  A row whose position is outside of the mask is NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.errors import InputError, UnsupportedError

DTYPES = ("float32", "float16", "bfloat16")
MAX_HEAD_DIM = 256
LEAST_NORMAL, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32
LAYOUTS = ("bhsd", "bshd", "hbsd", "hsbd", "sbhd", "shbd")  # the elements of a head lie side by side


class View(NamedTuple):
    """An input inside a one-dimensional buffer of `size` elements, such as q in a packed projection of q, k and v.

    Element (b, h, s, d) is at offset + b * batch + h * head + s * token + d.  Strides of 0 repeat.
    """

    size: int
    offset: int
    batch: int
    head: int
    token: int

    def __str__(self):
        return f"view {self.size}+{self.offset}:{self.batch},{self.head},{self.token}"

    def at(self, b, h, s, d):
        """Index of element (b, h, s, d) in the buffer, in elements; also for symbolic ones."""
        return self.offset + b * self.batch + h * self.head + s * self.token + d


class Layouts(NamedTuple):
    """The memory layout of each operand: one of `LAYOUTS`, or a `View` for an input.

    A layout names the dimensions of the buffer: "bhsd" is (batch, heads, length, dim), "bshd" (batch, length, heads,
    dim).  Logical indices are always (b, h, s, d); only the buffer differs.  So a kernel reads a projection's output,
    and writes the next projection's input, without a copy.
    """

    q: str | View = "bhsd"
    k: str | View = "bhsd"
    v: str | View = "bhsd"
    out: str = "bhsd"


class BlockMap(NamedTuple):
    """A block map that is known at run time: bool (batch, heads, ceil(q_len / block_m), ceil(kv_len / block_n)).

    A pair (i, j) is kept if the mask keeps it and the map is True for the block that holds it.  `batch` and `heads` are
    1 or those of the queries; `block_m` is a multiple of 16 and `block_n` one of 32.
    """

    batch: int
    heads: int
    block_m: int
    block_n: int

    def shape(self, q_len: int, kv_len: int) -> tuple[int, int, int, int]:
        """The operand's shape for these lengths."""
        return self.batch, self.heads, -(-q_len // self.block_m), -(-kv_len // self.block_n)


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes, dtypes and constants of one attention; hashable, so it keys caches of compiled kernels.

    Attributes
    ----------
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim : int
        q is (batch, q_heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim),
        v (batch, kv_heads, kv_len, v_head_dim), the output (batch, q_heads, q_len, v_head_dim).
    dtype : str
        Dtype of q, k, v and the output: one of `DTYPES`.
    scale : float
        Multiplies q·k before the softcap, and before the bias is added.
    bias_shape : tuple of 4 ints, optional
        Shape of the additive bias, broadcast to (batch, q_heads, q_len, kv_len); each entry is 1 or full.
    bias_dtype : str
        Dtype of the bias: one of `DTYPES`.
    key_counts : int
        Elements of the operand `key_count`, int32, after the bias: 1 for all, or one for each batch entry; 0 without.
        Keys from this number on do not take part.
    layouts : Layouts
        Layouts of q, k, v and the output.
    continues : bool
        Whether the last inputs are the result of another part of the mask for the same rows: `prior`, in the output's
        shape, layout and dtype, and `prior_lse`.  The output is then the result of both parts together; they must not
        overlap.
    gives_lse : bool
        Whether there is a second output, `lse`: float32 (batch, q_heads, q_len), the natural logarithm of the softmax's
        denominator, sum_j exp(x[b,h,i,j]), the sink's term included; -inf where that is 0.
    sink_dtype : str, optional
        Dtype of the sink, which has shape (q_heads,): one of `DTYPES`; None without a sink.  A part that another part
        continues has none, because a sink counts once.
    softcap : float, optional
        Scaled products s become softcap * tanh(s / softcap), before the bias and the mask: positive and finite in
        float32, as scale / softcap is finite.
    float32 : str
        How tensor cores multiply float32: "ieee" or "tf32" (cuda/float32); "ieee" for any other dtype and on CPUs.
    has_positions : bool
        Whether there is an operand `positions`, int64 (q_len,), after the sink: the row of the mask of each query.
    block_map : BlockMap, optional
        Whether there is an operand `block_map`, bool, after the sink: the blocks that are kept of what the mask keeps.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    scale: float
    bias_shape: tuple[int, int, int, int] | None = None
    bias_dtype: str = "float32"
    key_counts: int = 0
    layouts: Layouts = Layouts()
    continues: bool = False
    gives_lse: bool = False
    sink_dtype: str | None = None
    softcap: float | None = None
    float32: str = "ieee"
    has_positions: bool = False
    block_map: BlockMap | None = None

    def __post_init__(self):
        for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} must be a positive integer")
        if self.q_heads % self.kv_heads:
            raise InputError(f"q_heads={self.q_heads} must be a multiple of kv_heads={self.kv_heads}")
        for name in ("dtype", "bias_dtype", *(["sink_dtype"] if self.sink_dtype is not None else [])):
            if getattr(self, name) not in DTYPES:
                raise UnsupportedError(f"{name}={getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
        check_mode(self.float32, self.dtype)
        for name in ("head_dim", "v_head_dim"):
            if getattr(self, name) > MAX_HEAD_DIM:
                raise UnsupportedError(f"{name}={getattr(self, name)} exceeds the largest supported, {MAX_HEAD_DIM}")
        for name, layout in self.layouts._asdict().items():
            if isinstance(layout, View) and name != "out":
                self._check_view(name, layout)
            elif layout not in LAYOUTS:
                raise InputError(f"layout of {name} is {layout!r}, must be one of {', '.join(LAYOUTS)}")
        if self.bias_shape is not None:
            full = (self.batch, self.q_heads, self.q_len, self.kv_len)
            if len(self.bias_shape) != 4 or any(n not in (1, f) for n, f in zip(self.bias_shape, full)):
                raise InputError(f"bias of shape {self.bias_shape} does not broadcast to {full}")
        if self.key_counts not in (0, 1, self.batch):
            raise InputError(f"key_counts={self.key_counts} must be 0, 1 or the batch size, {self.batch}")
        if self.softcap is not None:
            # A comparison with NaN is false.
            if type(self.softcap) is bool or not LEAST_NORMAL <= self.softcap <= LARGEST:
                raise InputError(f"softcap={self.softcap!r} must be a positive, finite float32")
            if not abs(self.scale / self.softcap) <= LARGEST:
                raise InputError(f"scale={self.scale!r} over softcap={self.softcap!r} is no finite float32")
        if self.block_map is not None:
            self._check_block_map(self.block_map)

    def _check_block_map(self, given: BlockMap) -> None:
        for name, size, full in (("batch", given.batch, self.batch), ("heads", given.heads, self.q_heads)):
            if size not in (1, full):
                raise InputError(f"a block map for {name}={size} does not broadcast to {full}")
        for name, size, step in (("block_m", given.block_m, 16), ("block_n", given.block_n, 32)):
            if size < 1 or size % step:
                raise InputError(f"{name}={size} of a block map must be a positive multiple of {step}")
        if self.has_positions:
            raise UnsupportedError("a block map beside positions: its rows are those of the queries, not of the mask")

    def _check_view(self, operand: str, view: View) -> None:
        if min(view) < 0:
            raise InputError(f"{operand} is a {view}, whose numbers must not be negative")
        last = view.at(*(n - 1 for n in self.logical_shape(operand)))
        if last >= view.size:
            raise InputError(f"{operand} is a {view} whose last element is {last}: outside of its {view.size} elements")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def mask_rows(self) -> int:
        """Rows of the mask: one for each query, or with positions one for each key."""
        return self.kv_len if self.has_positions else self.q_len

    def logical_shape(self, operand: str) -> tuple[int, int, int, int]:
        """(batch, heads, length, dim) of "q", "k", "v" or "out"."""
        heads = self.q_heads if operand in ("q", "out") else self.kv_heads
        length = self.q_len if operand in ("q", "out") else self.kv_len
        dim = self.head_dim if operand in ("q", "k") else self.v_head_dim
        return self.batch, heads, length, dim

    def shape(self, operand: str) -> tuple[int, ...]:
        """The buffer's shape of "q", "k", "v" or "out", in its layout."""
        layout = getattr(self.layouts, operand)
        if isinstance(layout, View):
            return (layout.size,)
        return _arranged(layout, *self.logical_shape(operand))

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """(batch, q_heads, q_len), of `lse` and `prior_lse`."""
        return self.batch, self.q_heads, self.q_len

    def index(self, operand: str, b, h, s, d) -> tuple:
        """The buffer's index of logical element (b, h, s, d), for use inside a kernel."""
        layout = getattr(self.layouts, operand)
        if isinstance(layout, View):
            return (layout.at(b, h, s, d),)
        return _arranged(layout, b, h, s, d)

    def bias_index(self, b, h, i, j) -> tuple:
        """The bias buffer's index of score (b, h, i, j): 0 along broadcast dimensions."""
        assert self.bias_shape is not None
        return tuple(0 if n == 1 else x for n, x in zip(self.bias_shape, (b, h, i, j)))

    @property
    def has_key_count(self) -> bool:
        """Whether there is an operand `key_count`."""
        return self.key_counts > 0

    def key_count_index(self, b):
        """The key count's index for batch entry b."""
        return b if self.key_counts > 1 else 0


def _arranged(layout: str, b, h, s, d) -> tuple:
    """Four values, given for batch, heads, length and dim, in the order of a layout."""
    named = {"b": b, "h": h, "s": s, "d": d}
    return tuple(named[dimension] for dimension in layout)
