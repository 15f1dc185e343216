"""Masks by position: global tokens, prefixes, packed documents and padding."""

import numpy as np

from stof_tvm.masks.arguments import check_indices, check_int, check_ints
from stof_tvm.masks.mask import Grid, Leaf, Mask, spell
from stof_tvm.masks.pattern import And, Columns, EachDocument, EqualNumbers, Offsets, Or, Rows
from stof_tvm.masks.windows import is_by_distance
from tir_kernels.errors import MaskError


def global_tokens(n_or_indices) -> Mask:
    """Keeps every pair in which the query or the key is a global token.

    `n_or_indices` is an int n, the first n tokens, or a sequence of indices.  MaskError at lengths that an index
    exceeds.
    """
    tokens = check_tokens(n_or_indices)

    def member(length):
        if isinstance(tokens, int):
            return np.arange(length) < tokens
        return np.isin(np.arange(length), tokens)

    def bind(q_len, kv_len):
        if not isinstance(tokens, int) and tokens and tokens[-1] >= max(q_len, kv_len):
            raise MaskError(f"global token {tokens[-1]} is past q_len={q_len} and kv_len={kv_len}")
        return Or(Rows(member(q_len)), Columns(member(kv_len)))

    return Leaf(global_tokens, {"n_or_indices": tokens}, bind, has_fixed_places=True)


def check_tokens(n_or_indices) -> int | tuple[int, ...]:
    """The argument of `global_tokens` as a number of tokens or as sorted indices; MaskError for anything else."""
    if np.ndim(n_or_indices) or isinstance(n_or_indices, (set, frozenset)):
        return check_indices("n_or_indices", n_or_indices)
    return check_int("n_or_indices", n_or_indices)


def prefix_lm(n: int) -> Mask:
    """Keeps j <= i or j < n: causal, but the first n tokens see one another (T5, section 3.2.1).

    Raises MaskError unless n is an integer of at least 0.
    """
    n = check_int("n", n)

    def bind(q_len, kv_len):
        causal = Offsets(q_len, kv_len, lambda offset: offset <= 0)
        return Or(causal, Columns(np.arange(kv_len) < n))

    return Leaf(prefix_lm, {"n": n}, bind, has_fixed_places=True)


def document(lengths, inside: Mask | None = None, rest: int = 0) -> Mask:
    """Keeps pairs within the same document, of documents packed one after another.

    `lengths` are the documents' lengths, and `rest` tokens may follow, which see one another and nothing else; all must
    sum to q_len and to kv_len, else MaskError.  `inside` masks each document as if it were alone: its rows and columns
    are counted from the document's first token.  Raises MaskError for an `inside` that depends on the batch entry.
    """
    lengths, rest = check_ints("lengths", lengths), check_int("rest", rest)
    if not lengths:
        raise MaskError("document needs at least one length, got an empty sequence")
    if inside is None:
        lengths = (*lengths, rest) if rest else lengths
        return Leaf(document, {"lengths": lengths}, lambda q_len, kv_len: _documents(lengths, 0, q_len, kv_len))
    if not isinstance(inside, Mask):
        raise MaskError(f"inside must be a Mask, got {type(inside).__name__}")
    if inside.batch is not None:
        raise MaskError(f"inside={inside!r} depends on the batch entry, and documents are of one")
    return Documents(lengths, inside, rest)


def _documents(lengths: tuple[int, ...], rest: int, q_len: int, kv_len: int) -> EqualNumbers:
    total = sum(lengths) + rest
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if total != length:
            raise MaskError(f"document lengths sum to {total}, must sum to {name}={length}")
    number = np.repeat(np.arange(len(lengths) + 1), (*lengths, rest))
    return EqualNumbers(number, number)


class Documents(Mask):
    """`document(lengths, inside, rest)`."""

    def __init__(self, lengths: tuple[int, ...], inside: Mask, rest: int):
        self.lengths, self.inside, self.rest = lengths, inside, rest
        self.heads, self._is_fixed = inside.heads, inside._is_fixed

    def at(self, b, h):
        return self if self.heads is None else Documents(self.lengths, self.inside.at(b, h), self.rest)

    def bind(self, q_len, kv_len):
        same = _documents(self.lengths, self.rest, q_len, kv_len)
        if is_by_distance(self.inside):  # positions of a document differ as those of the whole do
            inside = self.inside.bind(q_len, kv_len)
            return And(same, Or(inside, Rows(np.arange(q_len) >= q_len - self.rest)) if self.rest else inside)
        of_length = {length: self.inside.bind(length, length) for length in set(self.lengths) if length}
        rest = Rows(np.ones(self.rest, np.bool_))
        return EachDocument(same, [*(of_length.get(length) for length in self.lengths), rest])

    @property
    def _parts(self):
        return Documents, self.lengths, self.inside.identity, self.rest

    def __repr__(self):
        return spell(document, {"lengths": self.lengths, "inside": self.inside, "rest": self.rest})


def padding(lengths) -> Mask:
    """Keeps j < lengths[b]: the keys of batch entry b that are no padding.  Queries past the length are not masked.

    `lengths` has one entry for each batch entry (or a single one for all); MaskError where one exceeds kv_len.
    """
    lengths = check_ints("lengths", lengths)
    if not lengths:
        raise MaskError("padding needs at least one length, got an empty sequence")
    if len(lengths) == 1:
        return _key_prefix(lengths[0])
    return Grid([[_key_prefix(length)] for length in lengths], spell(padding, {"lengths": lengths}))


def _key_prefix(length: int) -> Mask:
    def bind(q_len, kv_len):
        if length > kv_len:
            raise MaskError(f"padding length {length} exceeds kv_len={kv_len}")
        return Columns(np.arange(kv_len) < length)

    return Leaf(padding, {"lengths": (length,)}, bind)
