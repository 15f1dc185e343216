"""The order of tokens that a mask of row-major tokens wants, and the same mask in that order."""

import numpy as np

from stof_tvm.masks.canvas.families import sliding_tile
from stof_tvm.masks.canvas.order import tile_order
from stof_tvm.masks.mask import Grid, Leaf, Mask


def in_tile_order(mask: Mask) -> tuple[np.ndarray, Mask] | None:
    """(order, mask of the tokens x[:, order]) for sliding tiles of row-major tokens, or one of them for each head.

    The order is int64 (tokens,), that of `tile_order`.  None for other masks, and where heads want different orders.
    """
    if isinstance(mask, Leaf) and mask.constructor is sliding_tile and mask.arguments["order"] == "row-major":
        given = mask.arguments
        order = tile_order(given["canvas"], given["tile"], given["text"], given["text_first"]).order
        return order.numpy(), sliding_tile(**given | {"order": "tiles"})
    if not isinstance(mask, Grid):
        return None
    found = [[in_tile_order(entry) for entry in row] for row in mask.entries]
    orders = {None if each is None else each[0].tobytes() for row in found for each in row}
    if len(orders) != 1 or None in orders:
        return None
    entries = [[each[1] for each in row if each is not None] for row in found]
    return found[0][0][0], Grid(entries, mask.text)  # type: ignore[index]  # no entry is None
