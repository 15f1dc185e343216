"""Masks: the pairs that attention keeps, written once for all lengths and compiled to the kernels' storage.

    from stof_tvm import masks
    mask = masks.sliding_window(128) & masks.causal() | masks.global_tokens([0, 512])
    mask.dense(1024)            # bool tensor (1024, 1024)
    mask.density(131072)        # share kept, without an S × S array
    mask.compile(4096, block=(64, 64))

Rows are queries (i), columns are keys (j), both counted from 0 whatever the lengths; True is kept.
"""

from stof_tvm.masks.canvas.families import neighborhood, radial, sliding_tile
from stof_tvm.masks.canvas.in_tiles import in_tiles
from stof_tvm.masks.canvas.order import TileOrder, reordered, tile_order
from stof_tvm.masks.flex import from_block_mask, from_mask_mod
from stof_tvm.masks.mask import Mask, per_head
from stof_tvm.masks.published import a_shape, bigbird, fixed, longformer, strided, vertical_slash
from stof_tvm.masks.quality.recall import Recall, recall
from stof_tvm.masks.tensors import block_sparse, from_tensor
from stof_tvm.masks.tokens import document, global_tokens, padding, prefix_lm
from stof_tvm.masks.windows import causal, dilated_window, sliding_window

__all__ = [
    "Mask",
    "Recall",
    "TileOrder",
    "a_shape",
    "bigbird",
    "block_sparse",
    "causal",
    "dilated_window",
    "document",
    "fixed",
    "from_block_mask",
    "from_mask_mod",
    "from_tensor",
    "global_tokens",
    "in_tiles",
    "longformer",
    "neighborhood",
    "padding",
    "per_head",
    "prefix_lm",
    "radial",
    "recall",
    "reordered",
    "sliding_tile",
    "sliding_window",
    "strided",
    "tile_order",
    "vertical_slash",
]
