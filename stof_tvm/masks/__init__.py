"""Masks: the pairs that attention keeps, written once for all lengths and compiled to the kernels' storage.

    from stof_tvm import masks
    mask = masks.sliding_window(128) & masks.causal() | masks.global_tokens([0, 512])
    mask.dense(1024)            # bool tensor (1024, 1024)
    mask.density(131072)        # share kept, without an S × S array
    mask.compile(4096, block=(64, 64))

`masks.runtime` has rules, which find the blocks to keep from queries and keys in each call.

Rows are queries (i), columns are keys (j), both counted from 0 whatever the lengths; True is kept.
"""

import importlib
from typing import TYPE_CHECKING

from stof_tvm.masks import runtime as runtime
from stof_tvm.masks.canvas.families import neighborhood, radial, sliding_tile
from stof_tvm.masks.canvas.in_tiles import in_tiles
from stof_tvm.masks.canvas.order import TileOrder, reordered, tile_order
from stof_tvm.masks.flex import from_block_mask, from_mask_mod
from stof_tvm.masks.mask import Mask, per_head
from stof_tvm.masks.published import a_shape, bigbird, fixed, longformer, strided, vertical_slash
from stof_tvm.masks.quality.recall import Recall, recall
from stof_tvm.masks.tensors import block_sparse, from_tensor
from stof_tvm.masks.tokens import document, global_tokens, padding, prefix_lm
from stof_tvm.masks.windows import causal, dilated_window, everything, sliding_window

if TYPE_CHECKING:
    from stof_tvm.masks.quality.assignment import Assignment, load
    from stof_tvm.masks.quality.calibrate import calibrate

__all__ = [
    "Assignment",
    "Mask",
    "Recall",
    "TileOrder",
    "a_shape",
    "bigbird",
    "block_sparse",
    "calibrate",
    "causal",
    "dilated_window",
    "document",
    "everything",
    "fixed",
    "from_block_mask",
    "from_mask_mod",
    "from_tensor",
    "global_tokens",
    "in_tiles",
    "load",
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

# Loaded at first use: they read masks as text, whose names are those of this module.
_MODULE_OF = {
    "Assignment": "stof_tvm.masks.quality.assignment",
    "calibrate": "stof_tvm.masks.quality.calibrate",
    "load": "stof_tvm.masks.quality.assignment",
}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value
