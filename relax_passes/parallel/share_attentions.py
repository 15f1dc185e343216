"""Context parallelism: each attention of "main" becomes a call of a function that exchanges keys with other ranks.

    o = attention_7(q, k, v[, sink])     becomes     o = call_dps_packed("NAME", (q, k, v[, sink]))

Preconditions: every attention is a call of the composite over a rank's tokens of a sequence, and what the model itself
masks was taken off.  What the function computes is up to whoever names it: `name_of(call)` registers a packed function
for an attention and returns its name.  Raises UnsupportedError for an attention with an operand for pairs of tokens, of
which a rank has its own only.
"""

from collections.abc import Callable

import tvm
from tvm import relax

from relax_passes.attention.composite import AttentionCall, match_attention
from relax_passes.attention.site_names import named
from relax_passes.ir.rebuild import rebuild
from tir_kernels.errors import UnsupportedError


@tvm.transform.module_pass(opt_level=0, name="ShareAttentions")
class ShareAttentions:
    """Replace every attention of "main"."""

    def __init__(self, name_of: Callable[[AttentionCall], str]):
        self.name_of = name_of

    def transform_module(self, mod, _ctx):
        def replace(builder, var, new):
            call = match_attention(mod, var_values[var])
            if call is None:
                return None
            _check(call)
            operands = [call.q, call.k, call.v, *([] if call.sink is None else [call.sink])]
            return relax.call_dps_packed(self.name_of(call), tuple(map(new, operands)), out_ty=var.ty)

        blocks = mod["main"].body.blocks
        var_values = {binding.var: binding.value for block in blocks for binding in block.bindings}
        return rebuild(mod, replace)


def _check(call: AttentionCall) -> None:
    """UnsupportedError for what is added to or taken from scores of pairs of tokens."""
    given = call.bias if call.mask is None else call.mask  # either may be what is left of both
    pairs = {"mask or bias": given, "causal mask": call.causal or None, "cache": call.positions}
    pairs["cache"] = pairs["cache"] if call.first_row is None else call.first_row
    for name, value in pairs.items():
        if value is not None:
            raise UnsupportedError(
                f"attention {named(call.site)} has a {name} that calls compute for pairs of tokens: ranks that share a "
                "sequence know the pairs of their own tokens only, and masks that depend on positions alone and drop "
                "pairs by -inf or the dtype's least number (torch.finfo), not by -1e9; leave context_parallel out"
            )
