"""The rows of the report, one for each attention and one for each segment, and their JSON.

They are defined here, below the passes that write them, because a loaded engine has rows but no compiler.
"""

import math
from dataclasses import asdict, dataclass, fields, replace

LARGEST_MAP = 1 << 24  # elements of a block map that is kept for each attention
NUMBER = int | float
TIME = int | float | None
INDEX = int | None
TEXTS = list[str]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and dtype of an attention; `head_dim` is that of queries and keys.

    With `has_positions` the mask has kv_len rows; which of them a query has is known at run time.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    has_positions: bool = False


@dataclass(frozen=True, kw_only=True)
class SiteRow:
    """The row of an attention that stays dense; a `RewrittenRow` is that of an attention that a kernel computes.

    Attributes
    ----------
    site : str
        The path of the attention's module; "" is the model itself.
    spelling : str
        How the model writes the attention.
    reason : str
        Why it stays dense, or why it got its kernel.
    density, block_density : float
        Share of the elements that are kept, and share of the blocks that are computed; 1 if it stays dense.
    notes : tuple of str
        Remarks such as "constant bias".
    """

    site: str
    spelling: str
    reason: str
    density: float = 1.0
    block_density: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def rewritten(self) -> bool:
        """Whether a kernel computes the attention; if so, the row is a `RewrittenRow`."""
        return isinstance(self, RewrittenRow)

    def to_dict(self) -> dict:
        """JSON-serialisable data; the inverse is `site_row`."""
        data = {**asdict(self), "rewritten": self.rewritten, "notes": list(self.notes)}
        return data if self.rewritten or self.notes else {name: data[name] for name in data if name != "notes"}


@dataclass(frozen=True, kw_only=True)
class RewrittenRow(SiteRow):
    """An attention that a kernel computes.

    Attributes
    ----------
    kernel, config : str
        The template's name and its parameters.
    block : (int, int)
        Rows and columns of the blocks that the mask is stored in.
    mask, mask_digest : str
        The mask as text ("none" without a mask), and the digest of its storage.
    shape : AttentionShape
    layouts : tuple of str
        The layouts of q, k, v and the output.
    predicted_us, measured_us : float or None
        Predicted microseconds, and those that a tuning log has.
    first_row : int or None
        In an attention over a cache, the first query's row of the user's mask at (kv_len, kv_len); None where the
        mask's rows are those of the call, and with positions.
    all_heads : int or None
        How many heads the model's attention has where this engine computes only some of them.
    rule : str or None
        What finds, in each call, the blocks to keep among those of the mask.
    block_map : tuple of 4 ints, optional
        With a rule, the shape of what it finds: batch and heads, each 1 or all, and blocks of queries and of keys.
    """

    kernel: str
    config: str
    block: tuple[int, int]
    mask: str
    mask_digest: str
    shape: AttentionShape
    layouts: tuple[str, ...]
    predicted_us: float | None
    measured_us: float | None
    first_row: int | None = None
    all_heads: int | None = None
    rule: str | None = None
    block_map: tuple[int, ...] | None = None

    @property
    def returns_map(self) -> bool:
        """Whether a call returns the block map that it found: it has a rule, and the map is small."""
        return self.block_map is not None and math.prod(self.block_map) <= LARGEST_MAP

    @property
    def mask_shape(self) -> AttentionShape:
        """The shape with as many heads as a given mask is for."""
        return self.shape if self.all_heads is None else replace(self.shape, heads=self.all_heads)

    def to_dict(self) -> dict:
        data = {**super().to_dict(), "block": list(self.block), "layouts": list(self.layouts)}
        if self.first_row is None:  # as most rows, and those of earlier versions
            del data["first_row"]
        if self.all_heads is None:
            del data["all_heads"]
        if self.rule is None:
            del data["rule"], data["block_map"]
        else:
            data["block_map"] = list(self.block_map or ())
        if not self.shape.has_positions:
            del data["shape"]["has_positions"]
        return data


@dataclass(frozen=True)
class SegmentRow:
    """The row of a segment.

    Attributes
    ----------
    segment : int
        The segment's number.
    operators : tuple of str
        The names of its operators.
    kernel : str
        The name of a template or of an attention; "default" for functions that TVM compiles, and "deferred" for a norm
        that the kernels around it compute.
    config : str
        The template's parameters.  For "default" on a CPU: what scheduled the functions, a rule or a tuning record.
    reason : str
        Why the segment got this kernel.
    predicted_us, measured_us : float or None
        Predicted microseconds, None where nothing predicts them; measured ones, None without a tuning record.
    """

    segment: int
    operators: tuple[str, ...]
    kernel: str = ""
    config: str = ""
    reason: str = ""
    predicted_us: float | None = None
    measured_us: float | None = None

    def to_dict(self) -> dict:
        """JSON-serialisable data; the inverse is `segment_row`."""
        return {**asdict(self), "operators": list(self.operators)}


def site_row(data) -> SiteRow:
    """The row of an attention from its JSON.  ValueError names the row and the field that it lacks."""
    check_fields("site", data, {"site": str, "spelling": str, "rewritten": bool, "reason": str})
    check_fields("site", {**DENSE, **data}, {"density": NUMBER, "block_density": NUMBER, "notes": TEXTS})
    kept = {**DENSE, **data}
    common = {field.name: kept[field.name] for field in fields(SiteRow)} | {"notes": tuple(kept["notes"])}
    if not data["rewritten"]:
        return SiteRow(**common)
    check_fields("site", data, KERNEL)
    shape = {"has_positions": False, **data["shape"]}
    check_fields("shape", shape, {field.name: field.type for field in fields(AttentionShape)})
    check_fields("site", {**LATER, **data}, dict.fromkeys(LATER, INDEX))
    own = {name: {**LATER, **data}[name] for name in (*KERNEL, *LATER)}
    if "rule" in data:
        check_fields("site", data, RULE)
        if len(data["block_map"]) != 4 or min(data["block_map"]) < 1:
            raise ValueError(f"block_map {data['block_map']} of site {data['site'][:40]} must be four sizes")
        own |= {"rule": data["rule"], "block_map": tuple(data["block_map"])}
    own["shape"] = AttentionShape(**{field.name: shape[field.name] for field in fields(AttentionShape)})
    if len(data["block"]) != 2:
        raise ValueError(f"block {data['block']} of site {data['site'][:40]} must be rows and columns")
    return RewrittenRow(**common, **{**own, "block": tuple(own["block"]), "layouts": tuple(own["layouts"])})


def segment_row(data) -> SegmentRow:
    """The row of a segment from its JSON.  ValueError names the row and the field that it lacks."""
    check_fields("segment", data, SEGMENT)
    return SegmentRow(**{name: data[name] for name in SEGMENT} | {"operators": tuple(data["operators"])})


DENSE = {"density": 1.0, "block_density": 1.0, "notes": []}  # the values for a row without these fields
KERNEL = {
    "kernel": str,
    "config": str,
    "block": list[int],
    "mask": str,
    "mask_digest": str,
    "shape": dict,
    "layouts": TEXTS,
    "predicted_us": TIME,
    "measured_us": TIME,
}
LATER = {"first_row": None, "all_heads": None}  # the values for a row of an earlier version
RULE = {"rule": str, "block_map": list[int]}  # what the row of an attention with a rule has besides
SEGMENT = {
    "segment": int,
    "operators": TEXTS,
    "kernel": str,
    "config": str,
    "reason": str,
    "predicted_us": TIME,
    "measured_us": TIME,
}


def check_fields(name: str, row, kinds: dict) -> None:
    """Raise ValueError unless `row` is a dict whose fields have the types in `kinds`, where list[T] is a list of T."""
    for field, kind in kinds.items():
        if not isinstance(row, dict) or not _is_of(row.get(field, ...), kind):
            raise ValueError(f"{name} {str(row)[:40]} lacks {field!r} or has a malformed one")


def _is_of(value, kind) -> bool:
    if getattr(kind, "__origin__", None) is not list:
        return isinstance(value, kind)
    (entry,) = kind.__args__
    return isinstance(value, list) and all(isinstance(x, entry) for x in value)
