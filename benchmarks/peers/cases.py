"""The cases that are measured: shapes and masks of the attention grid, of its checks, and of decoding."""

from dataclasses import asdict, dataclass, replace

GRID_MASKS = ("causal", "sliding_window", "longformer", "bigbird", "dilated_window", "strided", "document")
GRID_SHAPES = (
    *((batch, 12, length, 64) for batch in (1, 8, 16) for length in (128, 256, 512, 1024, 2048, 4096)),
    *((1, 32, length, 128) for length in (4096, 8192, 16384)),
)
# Where the STOF paper's own kernel was timed (published.py): its masks are 32 wide at every length.
PUBLISHED_SHAPES = ((1, 12, 1024, 64), (8, 12, 2048, 64), (8, 12, 4096, 64), (16, 12, 4096, 64))
PUBLISHED_MASKS = ("causal", "sliding_window-32", "longformer-32", "bigbird-32")
PART_BLOCKS_SHAPES = ((8, 12, 4096, 64), (1, 32, 8192, 128))
# Masks that keep nothing that a causal mask drops, so that a causal kernel bounds what they need.
WITHIN_CAUSAL = ("causal", "strided")
# (batch, heads, kv heads, length, head size), masks, dtypes: long contexts, video, other head sizes.
BOTH = ("float16", "bfloat16")
LONG = (
    *(((1, 32, 32, length, 128), ("causal",), BOTH) for length in (2048, 4096, 8192)),
    ((1, 32, 8, 8192, 128), ("causal",), BOTH),
    *(((8, 12, 12, length, 64), ("causal",), ("float16",)) for length in (2048, 4096)),
    ((1, 32, 32, 8192, 128), ("prefix-1024",), ("float16",)),
    ((1, 32, 32, 16384, 128), ("document",), ("float16",)),
    ((1, 32, 32, 16384, 128), ("random_tiles-0.1", "random_tiles-0.25"), BOTH),
    ((1, 24, 24, 24576, 128), ("video",), ("bfloat16",)),
    ((1, 24, 24, 24576, 64), ("video",), ("float16",)),
    ((1, 32, 32, 16384, 64), ("random_tiles-0.25",), BOTH),
    ((1, 32, 8, 32768, 128), ("causal_window-4096",), ("float16",)),
    ((1, 32, 32, 65536, 128), ("causal_window-1024",), ("float16",)),
    *(((1, 16, 16, 4096, dim), ("causal", "sliding_window"), ("float16",)) for dim in (80, 96)),
)
SETS = ("all", "grid", "long")
DECODE_MASKS = ("random_blocks-0.05", "random_blocks-0.1", "random_blocks-0.25")


@dataclass(frozen=True, order=True)
class Case:
    """One attention: `bench` is "attention" or "decode"; `mask` is a name that patterns.py knows, "none" keeps all."""

    bench: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    mask: str
    dtype: str = "float16"

    @property
    def shape(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"{self.batch},{heads},{length},{self.head_dim}"

    @property
    def form(self) -> str:
        """The mask, and the dtype where it is not float16."""
        return self.mask if self.dtype == "float16" else f"{self.mask} {self.dtype}"

    @property
    def label(self) -> str:
        return f"{self.shape} {self.form}"

    def with_mask(self, mask: str) -> "Case":
        return replace(self, mask=mask)

    def to_json(self, density: float | None) -> dict:
        """The `case` object of a result row; the density is None where it never came to be computed."""
        fields = asdict(self)
        del fields["bench"]
        return {"mask": fields.pop("mask"), "density": density, **fields}

    @staticmethod
    def from_row(row: dict) -> "Case":
        fields = {name: value for name, value in row["case"].items() if name != "density"}
        return Case(bench=row["bench"], **fields)


def attention_case(batch: int, heads: int, length: int, head_dim: int, mask: str) -> Case:
    return Case("attention", batch, heads, heads, length, length, head_dim, mask)


def attention_cases(which: str = "all") -> list[Case]:
    """The cases of "grid" or of "long", which share a few, or of both."""
    cases = {"grid": grid_cases, "long": long_cases}
    return list(dict.fromkeys(case for name in cases if which in (name, "all") for case in cases[name]()))


def long_cases() -> list[Case]:
    """Whole masks of LONG."""
    return [
        Case("attention", batch, heads, kv_heads, length, length, head_dim, mask, dtype)
        for (batch, heads, kv_heads, length, head_dim), masks, dtypes in LONG
        for mask in masks
        for dtype in dtypes
    ]


def grid_cases() -> list[Case]:
    """The grid, the dense case of each shape, the published points and the two masks that price partial blocks."""
    cases = [attention_case(*shape, mask) for shape in GRID_SHAPES for mask in ("none", *GRID_MASKS)]
    cases += [attention_case(*shape, mask) for shape in PUBLISHED_SHAPES for mask in PUBLISHED_MASKS]
    cases += [attention_case(*shape, mask) for shape in PART_BLOCKS_SHAPES for mask in ("full_blocks", "part_blocks")]
    return list(dict.fromkeys(cases))


def decode_cases() -> list[Case]:
    """One query against a cache, with 32 heads and with 32 heads on 8."""
    return [
        Case("decode", batch, 32, kv_heads, 1, kv_len, 128, mask)
        for kv_heads in (32, 8)
        for batch in (1, 8, 16)
        for kv_len in (4096, 8192, 16384, 32768)
        for mask in ("none", *DECODE_MASKS)
    ]


def tiny(case: Case) -> Case:
    """The same case at a size that a CPU runs in no time: for dry runs."""
    heads = 2 if case.heads == case.kv_heads else 4
    length = 128 if case.q_len > 1 else 1
    kv_len = 128 if case.q_len > 1 else 640
    kv_heads = 2
    return replace(
        case, batch=min(case.batch, 2), heads=heads, kv_heads=kv_heads, q_len=length, kv_len=kv_len, head_dim=16
    )
