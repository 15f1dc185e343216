"""The attentions of an engine whose sequence ranks share: packed functions that its program calls."""

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tvm_ffi

from relax_passes.attention.composite import AttentionCall
from relax_passes.ir.bindings import dtype_of, shape_of
from stof_tvm.attention import Options
from stof_tvm.masks.mask import Mask
from stof_tvm.parallel.context.attention import context_attention
from stof_tvm.parallel.context.plan import ContextPlan, plan_of
from tir_kernels.report_rows import AttentionShape

_numbers = itertools.count()


@dataclass(frozen=True)
class SharedSite:
    """An attention of the whole sequence, as the report's rows describe one."""

    site: str
    shape: AttentionShape
    first_row: None = None

    @property
    def mask_shape(self) -> AttentionShape:
        """The sizes of its mask."""
        return self.shape


class SiteAttentions:
    """Computes the attentions of a rank's tokens; the program's functions are gone when this object is.

    Parameters
    ----------
    group : ProcessGroup
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
    sites : dict of str to SharedSite
        The attentions that the program has, by their paths.
    """

    def __init__(
        self, group: dist.ProcessGroup, plan: ContextPlan, masks: Mapping[str, Mask | None], batch: int, float32: str
    ):
        self.group, self.plan, self.masks, self.batch, self.float32 = group, plan, masks, batch, float32
        self.sites: dict[str, SharedSite] = {}

    def name_of(self, call: AttentionCall) -> str:
        """The name of a packed function for an attention of (1, H, batch · tokens, D), as ShareAttentions asks for it.

        It takes q, k, v, perhaps a sink, and where the result goes.
        """
        name = f"stof.context_attention.{next(_numbers)}"
        (_, heads, _, head_dim), kv_heads = shape_of(call.q), shape_of(call.k)[1]
        length = self.plan.length
        shape = AttentionShape(self.batch, heads, kv_heads, length, length, head_dim, dtype_of(call.q))
        self.sites[call.site] = SharedSite(call.site, shape)
        options = Options(scale=call.scale, softcap=call.softcap, float32=self.float32)
        here, path = weakref.ref(self), call.site

        def attention(*operands) -> None:
            q, k, v, *sink, out = map(torch.from_dlpack, operands)
            here().attend(path, options, q, k, v, sink[0] if sink else None, out)

        tvm_ffi.register_global_func(name, attention)
        weakref.finalize(self, tvm_ffi.remove_global_func, name)
        return name

    def attend(self, path: str, options: Options, q, k, v, sink, out) -> None:
        """Write the attention of a row into `out`; tensors of (1, H, batch · tokens, D), `sink` float (H,) or None.

        Raises what `sparse_attention` does with a group.
        """
        parts = [self._sequences(x) for x in (q, k, v)]
        mask = self.masks[path]
        plan = self.plan if mask is not None else self.plan_of(path)  # beside a plan, None is the plan's mask
        result = context_attention(*parts, mask, None, True, sink, options, self.group, plan)
        self._sequences(out).copy_(result)

    def plan_of(self, path: str) -> ContextPlan:
        """What ranks receive in the attention at a path, one of `sites`.  Raises nothing."""
        sizes = self.batch, self.sites[path].shape.heads, self.plan.length, self.plan.length
        return plan_of(self.masks[path], sizes, self.plan.ranks, self.plan.layout)

    def _sequences(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, H, tokens, D) of a row (1, H, batch · tokens, D)."""
        return x[0].unflatten(1, (self.batch, -1)).transpose(0, 1)
