"""A caller's mask, whose rows and columns are positions, for prompts of all lengths and for tokens after them."""

from collections.abc import Mapping

from stof_tvm.given_masks import given_mask, own_masks
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.part import Part
from tir_kernels.errors import MaskError

MODEL = "model"  # a Decoder's attribute, by which a path in the model is one in the Decoder


def masks_of_positions(given, batch: int, heads: int, length: int):
    """The mask that `build` takes for a Decoder: of a prompt it has the first rows and columns.

    `given` is what `build` takes: a mask, or masks by paths in the model.  Masks of fixed size have `length` rows and
    columns.  Raises MaskError for what is no mask, and for one that does not fit.
    """
    if given is None:
        return None
    sizes = batch, heads, length, length

    def whole(mask) -> Mask:
        made = given_mask(mask, sizes).make()
        if made is None:
            raise MaskError("mask={…: None}: leave the path out, its attentions then have the model's own mask")
        return Part(made, 0, 0, length)

    given = own_masks(given)
    if isinstance(given, Mapping):
        return {f"{MODEL}.{path}" if path else MODEL: whole(mask) for path, mask in given.items()}
    return whole(given)
