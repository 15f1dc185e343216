"""The attentions of an engine whose sequence ranks share: packed functions that its program calls."""

import itertools
import weakref
from collections.abc import Mapping

import torch
import tvm_ffi

from relax_passes.attention.composite import AttentionCall
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import dtype_of, shape_of
from stof_tvm.attention import Options
from stof_tvm.masks.mask import Mask
from stof_tvm.parallel.context.attention import context_attention
from stof_tvm.parallel.context.lists import BLOCK
from stof_tvm.parallel.context.plan import ContextPlan, plan_of
from stof_tvm.parallel.ranks import Peers
from tir_kernels.errors import UnsupportedError
from tir_kernels.report_rows import AttentionShape, RewrittenRow

_numbers = itertools.count()


class SiteAttentions:
    """Computes the attentions of a rank's tokens; the program's functions are gone when this object is.

    Parameters
    ----------
    peers : Peers
    plan : ContextPlan
        Who has which tokens.
    masks : dict
        What each attention keeps, by its path; None is all.
    batch : int
        How many sequences there are; a row has the rank's tokens of one after those of another.
    float32 : str
        How a GPU multiplies float32.

    Attributes
    ----------
    sites : dict of str to RewrittenRow
        The attentions that the program has, by their paths: rows of the report, of the whole sequence.
    """

    def __init__(self, peers: Peers, plan: ContextPlan, masks: Mapping[str, Mask | None], batch: int, float32: str):
        self.peers, self.plan, self.masks, self.batch, self.float32 = peers, plan, masks, batch, float32
        self.sites: dict[str, RewrittenRow] = {}

    def name_of(self, call: AttentionCall) -> str:
        """The name of a packed function for an attention of (1, H, batch · tokens, D), as ShareAttentions asks for it.

        It takes q, k, v, perhaps a sink, and where the result goes.  Raises UnsupportedError for an attention whose
        mask is not known.
        """
        if call.site not in self.masks:
            raise UnsupportedError(
                f"attention {named(call.site)} is none among the tokens of a sequence: leave context_parallel out"
            )
        name = f"stof.context_attention.{next(_numbers)}"
        self.sites[call.site] = self._row(call)
        options = Options(scale=call.scale, softcap=call.softcap, float32=self.float32)
        here, path = weakref.ref(self), call.site

        def attention(*operands) -> None:
            q, k, v, *sink, out = map(torch.from_dlpack, operands)
            attentions = here()
            assert attentions is not None
            attentions.attend(path, options, q, k, v, sink[0] if sink else None, out)

        tvm_ffi.register_global_func(name, attention)
        weakref.finalize(self, tvm_ffi.remove_global_func, name).atexit = False
        return name

    def attend(self, path: str, options: Options, q, k, v, sink, out) -> None:
        """Write the attention of a row into `out`; tensors of (1, H, batch · tokens, D), `sink` float (H,) or None.

        Raises what `sparse_attention` does with a group.
        """
        q, k, v = map(self._sequences, (q, k, v))
        mask = self.masks[path]
        plan = self.plan if mask is not None else self.plan_of(path)  # without a mask it is the plan's that holds
        result = context_attention(q, k, v, mask, None, True, sink, options, self.peers.group, plan)
        self._sequences(out).copy_(result)

    def plan_of(self, path: str, heads: int | None = None) -> ContextPlan:
        """What ranks receive in the attention at a path, one of `sites` or of so many heads.  Raises nothing."""
        heads = self.sites[path].shape.heads if heads is None else heads
        sizes = self.batch, heads, self.plan.length, self.plan.length
        return plan_of(self.masks[path], sizes, self.plan.ranks, self.plan.layout)

    def _row(self, call: AttentionCall) -> RewrittenRow:
        (one, heads, _, head_dim), kv_heads, length = shape_of(call.q), shape_of(call.k)[1], self.plan.length
        heads, kv_heads = one * heads, one * kv_heads  # where heads are written as a batch's entries
        mask, plan = self.masks[call.site], self.plan_of(call.site, heads)
        stored = plan.mask.compile(length, length, (BLOCK, BLOCK))
        received = int(plan.received_rows(kv_heads, self.batch).max())
        return RewrittenRow(
            site=call.site,
            spelling=call.spelling,
            reason=f"ranks share its sequence; one receives {received} rows of keys at most",
            density=stored.density,
            block_density=stored.block_density,
            kernel="sparse_attention of ranks",
            config="chosen at the first call",
            block=(BLOCK, BLOCK),
            mask="none" if mask is None else repr(mask),
            mask_digest=plan.digest,
            shape=AttentionShape(self.batch, heads, kv_heads, length, length, head_dim, dtype_of(call.q)),
            layouts=(),
            predicted_us=None,
            measured_us=None,
        )

    def _sequences(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, H, tokens, D) of a row (1, H, batch · tokens, D), or (H, 1, …); a view."""
        return x.flatten(0, 1).unflatten(1, (self.batch, -1)).transpose(0, 1)
