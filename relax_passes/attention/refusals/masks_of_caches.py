"""Masks that a user gives for attentions over a cache: refused, because nobody knows the rows.

A mask counts an attention's rows from 0.  Queries of an attention whose keys are a state, a cache that calls update,
stand at other positions in every call: a window or a causal mask would be another one than was meant.
"""

import json
from collections.abc import Callable

import tvm
from tvm import relax

from relax_passes.attention.composite import match_attention
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import STATES, Bindings, shape_of
from tir_kernels.errors import MaskError


@tvm.transform.module_pass(opt_level=0, name="RefuseMasksOfCaches")
class RefuseMasksOfCaches:
    """Raise MaskError for a user's mask on an attention whose keys or values come from a state, a cache.

    Whatever the model does with the cache before: a part of it, or a cache and new keys, have other lengths.  States of
    fewer than two dimensions are counters and statistics.

    Parameters
    ----------
    given_for : callable
        Maps a site's path and sizes (B, H, Sq, Skv) to the mask that the user gave for the site, or to None.
    """

    def __init__(self, given_for: Callable):
        self.given_for = given_for

    def transform_module(self, mod, _ctx):
        main = mod["main"]
        if STATES in (main.attrs or {}):
            _, states = json.loads(str(main.attrs[STATES]))
            bindings, parameters = Bindings(main), [main.params[number] for number, _ in states]
            caches = [x for x in parameters if len(shape_of(x)) >= 2]
            for value in bindings.values.values():
                if (call := match_attention(mod, value)) is not None:
                    self._check(bindings, call, caches)
        return mod

    def _check(self, bindings: Bindings, call, caches: list[relax.Var]) -> None:
        (batch, heads, rows, _), length = shape_of(call.q), shape_of(call.k)[2]
        if not any(bindings.depends_on(x, cache) for x in (call.k, call.v) for cache in caches):
            return
        if self.given_for(call.site, (batch, heads, rows, length)) is not None:
            raise MaskError(
                f"the attention {named(call.site)} reads a cache that the model updates, where the rows of a given "
                "mask mean other positions in every call: let the model compute its mask from positions (attn_mask), "
                "or use attn_implementation='stof' and stof_tvm.transformers.set_mask, which know positions"
            )
