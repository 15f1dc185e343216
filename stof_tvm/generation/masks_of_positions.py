"""A caller's mask, whose rows and columns are positions, for prompts of all lengths and for tokens after them."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from transformers.masking_utils import causal_mask_function

from relax_passes.attention.site_names import matches
from stof_tvm.given_masks import given_mask, own_masks
from stof_tvm.masks import causal
from stof_tvm.masks.flex import taken_directly
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.part import Part
from stof_tvm.site_masks import SiteMasks
from tir_kernels.errors import MaskError


def masks_of_positions(given, own: Mapping[str, Callable], batch: int, heads: int, length: int):
    """The mask that `build` takes for a Decoder: of a prompt it has the first rows and columns.

    Parameters
    ----------
    given : mask, mapping from path to mask, or None
        What `build` takes, with paths in the model.  Masks of fixed size have `length` rows and columns.
    own : dict
        Functions of the model's own masks, by the paths of their attentions.  The model applies these itself; here they
        say which keys need not be read.
    batch, heads, length : int

    Raises MaskError for what is no mask, and for one that does not fit.
    """
    sizes = batch, heads, length, length

    def made(mask) -> Mask:
        try:
            found = given_mask(mask, sizes).make()
        except MaskError as error:
            if not hasattr(mask, "shape"):
                raise
            raise MaskError(
                f"{error}: rows and columns are positions, of which there are max_length={length}"
            ) from None
        if found is None:
            raise MaskError("mask={…: None}: leave the path out, its attentions then have the model's own mask")
        return found

    given = own_masks(given)
    by_path = {path: made(mask) for path, mask in given.items()} if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        if not own:
            return Part(made(given), 0, 0, length)
        by_path = {"*": made(given)}
    for path, function in own.items():
        mask = causal() if function is causal_mask_function else taken_directly(function, batch, heads)
        if mask.batch is None and mask.heads is None:
            others = [pattern for pattern in by_path if matches(pattern, path)]
            by_path[path] = by_path[others[-1]] & mask if others else mask
    if not by_path and not isinstance(given, Mapping):
        return None
    return {path: Part(mask, 0, 0, length) for path, mask in by_path.items()}


def windows_of_layers(
    model: nn.Module, paths: Sequence[str], masks, sizes: tuple[int, int, int, int], layers: int
) -> list[int | None]:
    """For each layer of a cache, how many of the last tokens a later one attends to, itself included; None for all.

    Parameters
    ----------
    model : nn.Module
    paths : sequence of str
        Of all its attentions.
    masks
        What `masks_of_positions` made.
    sizes : (int, int, int, int)
        Batch entries, heads, queries and keys of the masks.
    layers : int
        Of the cache.
    """
    indices = {getattr(model.get_submodule(path), "layer_idx", None): path for path in paths}
    if masks is None or len(paths) != layers or set(indices) != set(range(layers)):
        return [None] * layers  # it is not known which attention reads which layer
    found, known = SiteMasks(masks), []
    for number in range(layers):
        reach = found.reach_for(indices[number], sizes)
        known.append(None if reach is None or math.isinf(reach[0]) else int(reach[0]) + 1)
    return known


def depends_on_entry(masks: Mask | Mapping[str, Mask] | None) -> bool:
    """Whether one of the masks that `masks_of_positions` gave is another one for another batch entry."""
    by_path = masks if isinstance(masks, Mapping) else {} if masks is None else {"*": masks}
    return any(mask.batch is not None for mask in by_path.values())
