"""Coordinates of the tokens of a canvas, in the orders of its sequences."""

import itertools


def places(canvas):
    """Row by row."""
    return list(itertools.product(*map(range, canvas)))


def tile_by_tile(canvas, tile):
    """Tile by tile, those with more tokens first, as loops write it."""
    starts = itertools.product(*(range(0, size, step) for size, step in zip(canvas, tile)))
    tiles = []
    for start in starts:
        ends = (min(a + step, size) for a, step, size in zip(start, tile, canvas))
        tiles.append(list(itertools.product(*(range(a, b) for a, b in zip(start, ends)))))
    return itertools.chain.from_iterable(sorted(tiles, key=len, reverse=True))
