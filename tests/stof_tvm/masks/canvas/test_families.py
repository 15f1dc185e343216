"""Masks of a canvas against formulas written here, query by query and key by key, with the coordinates of each."""

import math

import numpy as np
import pytest

from stof_tvm import masks
from tests.stof_tvm.masks.canvas.tokens import places, tile_by_tile
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask

BLOCKS = [(8, 8), (16, 64), (64, 64), (128, 96), (24, 40)]


def kept(tokens, keeps, text=0, text_first=False):
    """Boolean (length, length): `keeps` for pairs of tokens, True for text."""
    out = np.ones((len(tokens) + text,) * 2, bool)
    at = text if text_first else 0
    for i, a in enumerate(tokens):
        for j, b in enumerate(tokens):
            out[at + i, at + j] = keeps(a, b)
    return out


def in_tiles(canvas, tile, window):
    """Whether the tile of key b is in the window of tiles around that of query a."""

    def keeps(a, b):
        for x, y, size, step, reach in zip(a, b, canvas, tile, window):
            count, wanted = math.ceil(size / step), math.ceil(reach / step)
            if wanted < count:
                first = x // step - wanted // 2
                while first < 0:
                    first += 1
                while first + wanted > count:
                    first -= 1
                if not first <= y // step < first + wanted:
                    return False
        return True

    return keeps


def neighbors(x, size, window, dilation, causal):
    """The coordinates on one axis that x keeps, by NATTEN's definition."""
    group = list(range(x % dilation, size, dilation))
    at = group.index(x)
    if causal:
        return set(group[max(0, at - window + 1) : at + 1])
    first = min(max(0, at - window // 2), len(group) - window)
    return set(group[first : first + window])


def in_neighborhood(canvas, window, dilation, causal):
    axes = list(zip(canvas, window, dilation, causal))
    known = [[neighbors(x, *axis) for x in range(axis[0])] for axis in axes]
    return lambda a, b: all(y in near[x] for x, y, near in zip(a, b, known))


def in_band(canvas, decay, least, sink):
    size = math.prod(canvas[1:])

    def keeps(a, b):
        (i, k), (j, l) = a, b
        d, halved = abs(i - j), 1
        while 2 * halved <= max(d, 1):
            halved *= 2
        width = decay * size / halved
        near = abs(k - l) + 1 <= max(width, least) and d % max(1, math.ceil(least / width)) == 0
        return near or j < sink

    return keeps


def check(mask, expected, blocks=BLOCKS):
    length = len(expected)
    np.testing.assert_array_equal(mask.dense(length).numpy(), expected)
    for block in blocks:
        compiled = mask.compile(length, block=block)
        assert compiled == BlockSparseMask.from_dense(expected, block), block
        compiled.validate()
    assert mask.density(length) == pytest.approx(expected.mean())


SLIDING = [
    ((6, 8), (2, 4), (6, 4)),
    ((9, 13), (4, 4), (4, 12)),  # ragged at both ends
    ((4, 8, 8), (2, 4, 4), (2, 4, 4)),
    ((5, 6, 7), (2, 4, 3), (6, 8, 3)),  # ragged, an even number of tiles
    ((3, 1, 30), (2, 1, 8), (2, 1, 24)),  # one token high
    ((1, 5, 33), (1, 5, 16), (1, 5, 16)),
    ((4, 6, 6), (1, 2, 2), (100, 6, 2)),  # a window that is an axis
    ((3, 10, 7), (4, 3, 3), (3, 9, 9)),  # a tile longer than the axis
    ((70,), (8,), (24,)),
]


@pytest.mark.parametrize("canvas, tile, window", SLIDING, ids=str)
def test_sliding_tiles(canvas, tile, window):
    keeps = in_tiles(canvas, tile, window)
    in_order = list(tile_by_tile(canvas, tile))
    check(masks.sliding_tile(canvas, tile, window), kept(in_order, keeps))
    check(masks.sliding_tile(canvas, tile, window, order="row-major"), kept(places(canvas), keeps))
    for text, first in ((5, False), (13, True)):
        mask = masks.sliding_tile(canvas, tile, window, text=text, text_first=first)
        check(mask, kept(in_order, keeps, text, first), BLOCKS[:3])


def test_queries_of_full_tiles_keep_as_many_keys():
    mask = masks.sliding_tile((12, 16, 16), (4, 4, 4), (4, 12, 8))
    assert set(mask.dense(3072).sum(1).tolist()) == {4 * 12 * 8}
    compiled = mask.compile(3072)
    assert len(compiled.part_col_idx) == 0 and compiled.density == 4 * 12 * 8 / 3072


NEIGHBORHOODS = [
    ((7, 9), (3, 5), 1, False, None),
    ((8, 8), (4, 2), 1, False, None),  # even windows
    ((5, 6, 7), (3, 4, 7), 1, False, (2, 4, 3)),
    ((11, 13), (3, 3), (3, 2), False, None),  # dilated, groups of unlike sizes
    ((11, 13), (3, 3), (3, 2), False, (4, 8)),
    ((6, 5, 9), (3, 3, 2), (2, 1, 3), (True, False, False), None),
    ((9, 7), (4, 3), 1, (True, True), None),
    ((1, 90), (1, 7), 1, False, None),
    ((40, 1), 1, 1, False, None),
    ((90,), (5,), (7,), False, None),
]


@pytest.mark.parametrize("canvas, window, dilation, causal, tile", NEIGHBORHOODS, ids=str)
def test_neighborhoods(canvas, window, dilation, causal, tile):
    spread = lambda x: x if isinstance(x, tuple) else (x,) * len(canvas)
    keeps = in_neighborhood(canvas, spread(window), spread(dilation), spread(causal))
    tokens = places(canvas) if tile is None else list(tile_by_tile(canvas, tile))
    check(masks.neighborhood(canvas, window, dilation, causal, tile), kept(tokens, keeps))
    mask = masks.neighborhood(canvas, window, dilation, causal, tile, text=9, text_first=True)
    check(mask, kept(tokens, keeps, 9, True), BLOCKS[:3])


RADIAL = [
    ((9, 4, 6), 1.0, 1, 1),
    ((8, 24), 0.5, 8, 0),
    ((12, 3, 7), 1, 1, 0),
    ((20, 5), 1.0, 1, 2),  # bands of less than a token
    ((40, 1, 3), 0.3, 2, 1),
    ((3, 70), 0.1, 16, 0),
    ((5, 1, 9), 3.5, 30, 9),  # wider than a frame, more sinks than frames
    ((70, 1), 1, 1, 0),
    ((1, 8, 9), 0.25, 1, 0),
]


@pytest.mark.parametrize("canvas, decay, least, sink", RADIAL, ids=str)
def test_radial_bands(canvas, decay, least, sink):
    keeps = in_band(canvas, decay, least, sink)
    tokens = places((canvas[0], math.prod(canvas[1:])))
    check(masks.radial(canvas, decay, least, sink), kept(tokens, keeps))
    for text, first in ((5, False), (11, True)):
        mask = masks.radial(canvas, decay, least, sink, text, first)
        check(mask, kept(tokens, keeps, text, first), BLOCKS[:3])


def test_radial_bands_are_the_published_formula():
    frames, size = 20, 5

    def published(i, j, k, l):
        step = 2 ** math.floor(math.log2(max(abs(i - j), 1)))
        if step <= size and abs(k - l) + 1 <= size / step:
            return True
        return abs(i - j) % math.ceil(step / size) == 0 and k == l

    tokens = places((frames, size))
    expected = kept(tokens, lambda a, b: published(a[0], b[0], a[1], b[1]))
    np.testing.assert_array_equal(masks.radial((frames, size), sink=0).dense(100).numpy(), expected)


def test_token_strides():
    mask = masks.neighborhood((12, 17), (5, 3), (2, 3)) | masks.radial((12, 17), least=4)
    dense = mask.dense(204).numpy()
    for stride in (2, 7):
        assert (mask.compile(204, block=(16, 32), token_stride=stride).to_dense() == dense).all()


def test_compositions():
    canvas = (4, 6, 6)
    near, tiles = masks.neighborhood(canvas, 3), masks.sliding_tile(canvas, (2, 3, 3), (2, 3, 9), order="row-major")
    both = ~near & tiles | masks.radial(canvas, 0.25)
    dense = [x.dense(144) for x in (near, tiles, masks.radial(canvas, 0.25))]
    assert (both.dense(144) == (~dense[0] & dense[1] | dense[2])).all()
    assert (both.compile(144).to_dense() == both.dense(144).numpy()).all()
    heads = masks.per_head([near, tiles])
    assert (heads.dense(144)[0, 1] == dense[1]).all()


def test_equality():
    one = masks.sliding_tile((4, 6), 2, (2, 6))
    assert one == masks.sliding_tile([4, 6], (2, 2), [2, 6]) and hash(one) == hash(
        masks.sliding_tile((4, 6), 2, (2, 6))
    )
    assert one != masks.sliding_tile((4, 6), 2, (2, 6), order="row-major") != masks.sliding_tile((4, 6), 2, (2, 2))
    assert masks.neighborhood((4, 6), 3) == masks.neighborhood((4, 6), (3, 3), (1, 1), (False, False))
    assert masks.radial((4, 6)) == masks.radial((4, 6), 1) != masks.radial((4, 2, 3))


@pytest.mark.slow
def test_a_long_video_compiles_in_little_memory():
    import tracemalloc

    tracemalloc.start()
    compiled = masks.sliding_tile((30, 48, 80), (6, 8, 8), (18, 24, 24), text=256).compile(115456)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert compiled.density == pytest.approx((0.09 * 115200**2 + 115456**2 - 115200**2) / 115456**2)
    assert len(compiled.part_col_idx) == 0


REFUSED = [
    (lambda: masks.sliding_tile(64, 8, 8), r"canvas=64 must be a tuple of 1 to 3 sizes, such as \(T, H, W\)"),
    (lambda: masks.sliding_tile((1, 2, 3, 4), 1, 1), r"canvas=\(1, 2, 3, 4\) must be a tuple of 1 to 3 sizes"),
    (lambda: masks.sliding_tile((4, 0), 1, 1), r"canvas\[1\]=0 must be an integer of at least 1"),
    (lambda: masks.sliding_tile((4, 8), (2, 0), 2), r"tile\[1\]=0 must be an integer of at least 1"),
    (
        lambda: masks.sliding_tile((4, 8), (2, 2, 2), 2),
        r"tile=\(2, 2, 2\) has 3 axes, must have those of canvas=\(4, 8\)",
    ),
    (
        lambda: masks.sliding_tile((4, 8), 2, (2, 3)),
        r"window\[1\]=3 must be a multiple of tile\[1\]=2, or at least canv",
    ),
    (lambda: masks.sliding_tile((4, 8), 2, 2, order="tile"), "order='tile' must be 'tiles' or 'row-major'"),
    (lambda: masks.sliding_tile((4, 8), 2, 2, text=-1), "text=-1 must be an integer of at least 0"),
    (
        lambda: masks.neighborhood((4, 8), (5, 3)),
        r"window\[0\]=5 with dilation\[0\]=1 covers 5 tokens, must be at most",
    ),
    (lambda: masks.neighborhood((9, 8), 3, 3), r"window\[1\]=3 with dilation\[1\]=3 covers 9 tokens, .* canvas\[1\]=8"),
    (lambda: masks.neighborhood((9, 8), 3, causal=1), r"causal=\(1, 1\) must be True or False"),
    (lambda: masks.neighborhood((9, 8), 3, causal=(True,)), r"causal=\(True,\) must be True or False"),
    (lambda: masks.radial((9,)), r"canvas=\(9,\) must be a tuple of 2 to 3 sizes"),
    (lambda: masks.radial((9, 8), 0), "decay=0 must be a positive number"),
    (lambda: masks.radial((9, 8), float("nan")), "decay=nan must be a positive number"),
    (lambda: masks.radial((9, 8), least=0), "least=0 must be an integer of at least 1"),
    (lambda: masks.radial((9, 8), sink=-1), "sink=-1 must be an integer of at least 0"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refused_at_construction(make, message):
    with pytest.raises(MaskError, match=message):
        make()


@pytest.mark.parametrize(
    "mask",
    [masks.sliding_tile((4, 8), 2, 2, text=3), masks.neighborhood((4, 8), 3, text=3), masks.radial((4, 8), text=3)],
)
def test_refused_at_lengths(mask):
    name = mask.constructor.__name__
    for lengths in ((32, 32), (35, 36), (36, 35)):
        with pytest.raises(MaskError, match=rf"{name}: canvas=\(4, 8\) and text=3 is 35 tokens, must be [qkv]+_len=3"):
            mask.compile(*lengths)


def test_numbers_at_the_ends_of_their_ranges():
    widest = masks.radial((5, 6), decay=1e300, least=2**62, sink=0)
    assert widest.dense(30).all()
    narrowest = masks.radial((5, 6), decay=5e-324, least=2**62, sink=0).dense(30).view(5, 6, 5, 6)
    assert (narrowest.permute(0, 2, 1, 3).flatten(2).all(-1) == np.eye(5, dtype=bool)).all()
    with pytest.raises(MaskError, match="must be"):
        masks.sliding_tile((2**40, 2**40), 1, 1).compile(64)
