"""Lazy masks: the pairs that attention keeps, for lengths that are given later, composed by &, | and ~."""

import functools
import inspect
import pickle
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

import torch

from stof_tvm.masks import compilation, pattern
from stof_tvm.masks.identity import Identity
from stof_tvm.running.between_graphs import AT_ONCE, between_graphs
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask

if TYPE_CHECKING:
    from stof_tvm.given_masks import GivenAsMask


class Mask(ABC):
    """Which (query row i, key column j) pairs an attention keeps; True is kept.

    Masks are immutable and hashable: masks that are written alike are equal and share compiled storage.  Only a mask of
    a function (`from_mask_mod`) may change with what the function reads; it is compared by its current contents.

    Attributes
    ----------
    batch, heads : int or None
        Number of batch entries and heads with patterns of their own; None if all share one pattern.
    has_fixed_places : bool
        Whether what is kept at a row and a column is the same at all lengths that have them.  False where that is not
        known.
    """

    batch: int | None = None
    heads: int | None = None
    has_fixed_places: bool = False

    @between_graphs(AT_ONCE)
    def dense(self, q_len: int, kv_len: int | None = None) -> torch.Tensor:
        """Boolean (q_len, kv_len), or (batch or 1, heads or 1, q_len, kv_len) where the mask depends on either.

        kv_len defaults to q_len.  MaskError where the mask does not fit the lengths.
        """
        return compilation.dense_mask(self, q_len, kv_len)

    @between_graphs(AT_ONCE)
    def compile(
        self, q_len: int, kv_len: int | None = None, block: tuple[int, int] = (64, 64), token_stride: int = 1
    ) -> BlockSparseMask:
        """The storage that kernels read, with blocks of `block` = (height, width), multiples of 8.

        kv_len defaults to q_len.  With `token_stride` above 1 a block holds tokens at that distance (see
        tir_kernels/masks/token_blocks.py).  No q_len × kv_len array is ever made.  Results are cached, so treat them as
        read-only.  A mask that keeps nothing compiles, too (`.is_empty` of the result says so).  Raises MaskError if
        the mask does not fit the lengths.
        """
        return compilation.compile_mask(self, q_len, kv_len, block, token_stride)

    def split(self, distance: int) -> "tuple[Mask, Mask]":
        """The mask as a union of two: what it keeps with |i - j| <= distance, and what it keeps beyond.

        Raises MaskError unless `distance` is an integer of at least 0.
        """
        from stof_tvm.masks.windows import sliding_window

        near = sliding_window(distance)
        return self & near, self & ~near

    @between_graphs(AT_ONCE)
    def density(self, q_len: int, kv_len: int | None = None) -> float:
        """Kept pairs over all pairs, averaged over batch entries and heads; kv_len defaults to q_len.

        Raises MaskError where the mask does not fit the lengths.
        """
        return self.compile(q_len, kv_len).density

    def plot(self, q_len: int, kv_len: int | None = None, batch: int = 0, head: int = 0, ax=None, block=(64, 64)):
        """Draw the pattern of one batch entry and head with matplotlib; returns the Axes.

        Full blocks are blue, partial blocks orange, pale where they drop something, and empty blocks left out; masks
        of more than 1024 queries or keys are drawn without their elements.  `stof_tvm.pictures.block_mask` draws all
        heads beside each other.

        Parameters
        ----------
        q_len, kv_len : int
            Number of queries and keys; kv_len defaults to q_len.
        batch, head : int
            The batch entry and head to draw, of a mask that depends on them.
        ax : matplotlib.axes.Axes, optional
            Where to draw; a new figure by default.
        block : (int, int)
            Height and width of the blocks, multiples of 8.

        Raises
        ------
        MaskError
            The mask does not fit the lengths.
        InputError
            The mask has no such batch entry or head.
        UnsupportedError
            There is no matplotlib.
        """
        from stof_tvm.pictures.mask_blocks import draw_entry

        return draw_entry(self, q_len, kv_len, batch, head, ax, block)

    @abstractmethod
    def at(self, b: int, h: int) -> "Mask":
        """The mask of batch entry b and head h: a mask that depends on neither.

        IndexError where the mask depends on the batch entry or head and has no such one.
        """

    @abstractmethod
    def bind(self, q_len: int, kv_len: int):
        """The pattern (see pattern.py) at lengths q_len and kv_len, of a mask that depends on neither batch nor head.

        MaskError where the mask does not fit the lengths.
        """

    @property
    def identity(self) -> Identity:
        """A key that equal masks share, by which caches identify a mask; it holds no array."""
        if self._identity is not None:
            return self._identity
        identity = Identity(self._parts)
        if self._is_fixed:
            self._identity = identity
        return identity

    @property
    @abstractmethod
    def _parts(self) -> tuple:
        """The values that decide what the mask keeps, as `Identity` takes them."""

    _identity: Identity | None = None
    _is_fixed: bool = True  # whether the parts are always the same

    # The other operand, left or right, may be anything that `build` accepts as a mask.
    def __and__(self, other: "GivenAsMask") -> "Mask":
        return _joined(And, self, other)

    def __rand__(self, other: "GivenAsMask") -> "Mask":
        return _joined(And, other, self)

    def __or__(self, other: "GivenAsMask") -> "Mask":
        return _joined(Or, self, other)

    def __ror__(self, other: "GivenAsMask") -> "Mask":
        return _joined(Or, other, self)

    def __invert__(self) -> "Mask":
        return Not(self)

    __array_ufunc__ = None  # NumPy would combine each element of an array with the mask

    def __bool__(self):
        raise MaskError(f"{self!r} has no truth value; combine masks by &, | and ~, not by and, or, not")

    def __copy__(self) -> "Mask":
        return self

    def __deepcopy__(self, memo: dict) -> "Mask":
        return self

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_identity"}  # made again where it is read

    def __eq__(self, other):
        return isinstance(other, Mask) and (self is other or self.identity == other.identity)

    def __hash__(self):
        return hash(self.identity)


def _joined(kind, a, b):
    """Two operands as one mask; NotImplemented if `build` would not accept one of them as a mask."""
    if not (isinstance(a, Mask) and isinstance(b, Mask)):
        from stof_tvm.given_masks import GivenAsMask, without_sizes

        if not (isinstance(a, GivenAsMask) and isinstance(b, GivenAsMask)):
            return NotImplemented
        a, b = without_sizes(a), without_sizes(b)
    return kind(a, b)


class Leaf(Mask):
    """A mask that a constructor made, the same for every batch entry and head.

    Two leaves with the same constructor and `arguments` (hashable values) are equal; `bind(q_len, kv_len)` gives the
    pattern, and `has_fixed_places` says that it is computed from the places alone, at no lengths differently.  Where
    the constructor does not take these arguments, `source`, a function and its arguments, makes the leaf again.
    """

    def __init__(self, constructor, arguments: dict, bind, has_fixed_places: bool = False, source: tuple = ()):
        self.constructor, self.arguments, self._bind = constructor, arguments, bind
        self.has_fixed_places, self._source = has_fixed_places, source

    def __reduce__(self):
        if self._source:
            return self._source
        make = functools.partial(self.constructor, **self.arguments)
        try:
            is_same = make() == self
        except (TypeError, ValueError, MaskError):
            is_same = False
        if not is_same:
            raise pickle.PicklingError(f"{self!r} cannot be pickled: it reads what is not a part of it; make it anew")
        return make, ()

    def at(self, b, h):
        return self

    def bind(self, q_len, kv_len):
        return self._bind(q_len, kv_len)

    @property
    def _parts(self):
        return self.constructor, tuple(self.arguments.items())

    def __repr__(self):
        return spell(self.constructor, self.arguments)


class Grid(Mask):
    """One mask for each batch entry and head: rows (batch) of masks (heads); a side of length 1 is shared by all."""

    def __init__(self, entries: list[list[Mask]], text: str):
        self.entries, self.text = tuple(map(tuple, entries)), text
        masks = [mask for row in self.entries for mask in row]
        own_batch, own_heads = (n if n > 1 else None for n in (len(self.entries), len(self.entries[0])))
        self.batch = common_size("batch entries", [own_batch, *(mask.batch for mask in masks)])
        self.heads = common_size("heads", [own_heads, *(mask.heads for mask in masks)])
        self._is_fixed = all(mask._is_fixed for mask in masks)
        self.has_fixed_places = all(mask.has_fixed_places for mask in masks)

    def at(self, b, h):
        row = self.entries[b if len(self.entries) > 1 else 0]
        return row[h if len(row) > 1 else 0].at(b, h)

    def bind(self, q_len, kv_len):
        return self.at(0, 0).bind(q_len, kv_len)

    @property
    def _parts(self):
        return Grid, tuple(tuple(mask.identity for mask in row) for row in self.entries)

    def __repr__(self):
        return self.text


class _Binary(Mask):
    """Two masks joined by an operator: `symbol` spells it, `joined` combines two patterns."""

    symbol: ClassVar[str]
    joined: ClassVar[Callable]

    def __init__(self, a: Mask, b: Mask):
        self.a, self.b = a, b
        self.batch = common_size("batch entries", (a.batch, b.batch))
        self.heads = common_size("heads", (a.heads, b.heads))
        self._is_fixed = a._is_fixed and b._is_fixed
        self.has_fixed_places = a.has_fixed_places and b.has_fixed_places

    def at(self, b, h):
        return type(self)(self.a.at(b, h), self.b.at(b, h))

    def bind(self, q_len, kv_len):
        return self.joined(self.a.bind(q_len, kv_len), self.b.bind(q_len, kv_len))

    @property
    def _parts(self):
        return type(self), self.a.identity, self.b.identity

    def __repr__(self):
        # The same operator needs no parentheses on its left, as Python reads it.
        left = repr(self.a) if not isinstance(self.a, _Binary) or type(self.a) is type(self) else f"({self.a!r})"
        right = f"({self.b!r})" if isinstance(self.b, _Binary) else repr(self.b)
        return f"{left} {self.symbol} {right}"


class And(_Binary):
    """Keeps what both masks keep."""

    symbol, joined = "&", staticmethod(pattern.intersection)


class Or(_Binary):
    """Keeps what either mask keeps."""

    symbol, joined = "|", staticmethod(pattern.union)


class Not(Mask):
    """Keeps what the mask does not."""

    def __init__(self, a: Mask):
        self.a, self.batch, self.heads, self._is_fixed = a, a.batch, a.heads, a._is_fixed
        self.has_fixed_places = a.has_fixed_places

    def at(self, b, h):
        return Not(self.a.at(b, h))

    def bind(self, q_len, kv_len):
        return pattern.complement(self.a.bind(q_len, kv_len))

    def __invert__(self) -> Mask:
        return self.a

    @property
    def _parts(self):
        return Not, self.a.identity

    def __repr__(self):
        return f"~({self.a!r})" if isinstance(self.a, _Binary) else f"~{self.a!r}"


def per_head(masks) -> Mask:
    """One mask for each head, in order; each may depend on the batch entry, none on the head.

    MaskError for an empty list, something that is not a Mask, or masks that depend on the head already.
    """
    if isinstance(masks, Mask) or not isinstance(masks, Iterable):
        raise MaskError(f"per_head needs a list of masks, one for each head, got {reprlib.repr(masks)}")
    masks = list(masks)
    if not masks:
        raise MaskError("per_head needs at least one mask, got an empty list")
    for h, mask in enumerate(masks):
        if not isinstance(mask, Mask):
            raise MaskError(f"per_head entry {h} must be a Mask, got {type(mask).__name__}")
        if mask.heads is not None:
            raise MaskError(f"per_head entry {h}, {mask!r}, depends on the head already")
    return Grid([masks], f"per_head([{', '.join(map(repr, masks))}])")


def common_size(name: str, sizes) -> int | None:
    """The one size that is not None; MaskError where they differ."""
    known = sorted({size for size in sizes if size is not None})
    if len(known) > 1:
        raise MaskError(f"masks for {known[0]} and {known[1]} {name} do not combine")
    return known[0] if known else None


def spell(constructor, arguments: dict, spelled=reprlib.repr) -> str:
    """The call that made a mask, arguments at their defaults left out; `spelled` gives the text of a tuple."""
    parameters = inspect.signature(constructor).parameters
    shown = []
    for name, value in arguments.items():
        default = parameters[name].default
        if value == default and default is not inspect.Parameter.empty:
            continue
        text = spelled(value) if isinstance(value, tuple) else getattr(value, "__name__", None) or repr(value)
        shown.append(text if default is inspect.Parameter.empty else f"{name}={text}")
    return f"{constructor.__name__}({', '.join(shown)})"
