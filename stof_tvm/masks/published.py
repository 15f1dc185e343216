"""Masks that papers propose: Longformer, BigBird, Sparse Transformer, A-shape and vertical-slash."""

import math
import reprlib

import numpy as np

from stof_tvm.masks.arguments import check_indices, check_int
from stof_tvm.masks.mask import Leaf, Mask
from stof_tvm.masks.pattern import And, Columns, EqualNumbers, Offsets, Or, RandomBlocks
from stof_tvm.masks.tokens import check_tokens
from stof_tvm.masks.tokens import global_tokens as tokens_seen_by_all
from stof_tvm.masks.windows import sliding_window
from tir_kernels.errors import MaskError


def longformer(window: int | None = None, global_tokens=None) -> Mask:
    """Keeps |i - j| <= window and everything to and from the global tokens (Beltagy et al., 2020).

    `global_tokens` is a count (the first ones) or a sequence of indices.  Each argument that is None is the square
    root of kv_len, rounded down, as in the STOF paper (table 2).  Raises MaskError for numbers that are no counts or
    indices, and at lengths that an index exceeds.
    """
    window = None if window is None else check_int("window", window)
    global_tokens = _global_argument(global_tokens)

    def bind(q_len, kv_len):
        return _window_and_global(window, global_tokens, kv_len).bind(q_len, kv_len)

    has_fixed_places = None not in (window, global_tokens)
    return Leaf(longformer, {"window": window, "global_tokens": global_tokens}, bind, has_fixed_places)


def bigbird(
    window: int | None = None, global_tokens=None, random_fill: float = 0.1, block: int = 64, seed: int = 0
) -> Mask:
    """Longformer's mask and random blocks: each block × block square is kept with probability `random_fill`.

    (Zaheer et al., 2020; table 2 of the STOF paper.) Whether a square is kept depends only on `seed` and its position,
    so the pattern is the same at every length, on every machine and for every block size that it is compiled to.
    `window` and `global_tokens` are `longformer`'s.  Raises MaskError as `longformer`, and for a `random_fill` outside
    of 0 … 1.
    """
    window = None if window is None else check_int("window", window)
    global_tokens = _global_argument(global_tokens)
    block, seed = check_int("block", block, least=1), check_int("seed", seed, largest=2**64 - 1)
    if isinstance(random_fill, bool) or not isinstance(random_fill, (int, float)) or not 0 <= random_fill <= 1:
        raise MaskError(f"random_fill={reprlib.repr(random_fill)} must be a number in 0…1")

    def bind(q_len, kv_len):
        fixed = _window_and_global(window, global_tokens, kv_len).bind(q_len, kv_len)
        return Or(fixed, RandomBlocks(kv_len, block, random_fill, seed))

    arguments = {"window": window, "global_tokens": global_tokens, "random_fill": float(random_fill)}
    has_fixed_places = None not in (window, global_tokens)  # random blocks are drawn by their places
    return Leaf(bigbird, {**arguments, "block": block, "seed": seed}, bind, has_fixed_places)


def strided(stride: int) -> Mask:
    """Keeps j <= i where i - j <= stride or i - j is a multiple of stride (Sparse Transformer, section 4.3).

    Raises MaskError unless `stride` is a positive integer.
    """
    stride = check_int("stride", stride, least=1)

    def bind(q_len, kv_len):
        return Offsets(q_len, kv_len, lambda d: (d <= 0) & ((d >= -stride) | (d % stride == 0)))

    return Leaf(strided, {"stride": stride}, bind, has_fixed_places=True)


def fixed(stride: int, summary: int) -> Mask:
    """Keeps j <= i where j is in i's chunk of `stride` tokens, or among the last `summary` tokens of any chunk.

    (Sparse Transformer, section 4.3, "fixed"; `summary` is its c.)  Raises MaskError unless both are positive integers
    and `summary` is at most `stride`.
    """
    stride = check_int("stride", stride, least=1)
    summary = check_int("summary", summary)
    if summary > stride:
        raise MaskError(f"summary={summary} must be at most stride={stride}")

    def bind(q_len, kv_len):
        causal = Offsets(q_len, kv_len, lambda offset: offset <= 0)
        own_run = EqualNumbers(np.arange(q_len) // stride, np.arange(kv_len) // stride)
        return And(causal, Or(own_run, Columns(np.arange(kv_len) % stride >= stride - summary)))

    return Leaf(fixed, {"stride": stride, "summary": summary}, bind, has_fixed_places=True)


def a_shape(sink: int, window: int) -> Mask:
    """Keeps j <= i where j < sink or i - j <= window (attention sinks: StreamingLLM, Xiao et al., 2023).

    Raises MaskError unless both are integers of at least 0.
    """
    sink, window = check_int("sink", sink), check_int("window", window)

    def bind(q_len, kv_len):
        causal = Offsets(q_len, kv_len, lambda offset: offset <= 0)
        near = Offsets(q_len, kv_len, lambda offset: offset >= -window)
        return And(causal, Or(near, Columns(np.arange(kv_len) < sink)))

    return Leaf(a_shape, {"sink": sink, "window": window}, bind, has_fixed_places=True)


def vertical_slash(vertical, slash) -> Mask:
    """Keeps j <= i where j is one of `vertical` or i - j is one of `slash` (MInference, Jiang et al., 2024).

    Both are sequences of non-negative integers: key columns, and distances of diagonals from the main one.  MaskError
    at lengths that a column or a distance exceeds.
    """
    if isinstance(vertical, int) and isinstance(slash, int):
        raise MaskError(
            f"vertical_slash({vertical}, {slash}): a static mask takes the columns and the distances themselves, as "
            "sequences of integers; the rule that finds so many of them at run time is masks.runtime.vertical_slash "
            "(`stof … --rule`)"
        )
    vertical, slash = check_indices("vertical", vertical), check_indices("slash", slash)

    def bind(q_len, kv_len):
        if vertical and vertical[-1] >= kv_len:
            raise MaskError(f"vertical_slash column {vertical[-1]} must be less than kv_len={kv_len}")
        if slash and slash[-1] >= q_len:
            raise MaskError(f"vertical_slash distance {slash[-1]} must be less than q_len={q_len}")
        causal = Offsets(q_len, kv_len, lambda offset: offset <= 0)
        diagonals = Offsets(q_len, kv_len, lambda offset: np.isin(-offset, slash))
        return And(causal, Or(diagonals, Columns(np.isin(np.arange(kv_len), vertical))))

    return Leaf(vertical_slash, {"vertical": vertical, "slash": slash}, bind, has_fixed_places=True)


def _global_argument(global_tokens):
    """The argument as an int or a tuple; None stays None."""
    return None if global_tokens is None else check_tokens(global_tokens)


def _window_and_global(window, global_tokens, kv_len) -> Mask:
    root = math.isqrt(kv_len)
    window = root if window is None else window
    return sliding_window(window) | tokens_seen_by_all(root if global_tokens is None else global_tokens)
