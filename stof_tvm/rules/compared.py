"""The proof of an engine with rules: results under the blocks that it found, and these blocks beside PyTorch's.

A block that a rounding of q and k lets the rule choose otherwise is no error of a kernel, but it changes results by far
more than a rounding.  So PyTorch computes with the blocks that the engine found, and the blocks are compared by
themselves: those of the rule in PyTorch, from PyTorch's own q and k, must be the same but for near ties (near_ties.py).
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from relax_passes.attention.site_names import named
from stof_tvm.frontend import ImportedModel
from stof_tvm.masks.runtime.rule import Rule, for_rule
from stof_tvm.masks.tensors import block_sparse
from stof_tvm.rules.found import FoundBlocks
from stof_tvm.rules.near_ties import near_ties
from stof_tvm.verification.comparison import CLOSE
from tir_kernels.report_rows import AttentionShape, RewrittenRow

SDPA = torch.ops.aten.scaled_dot_product_attention.default


class ComparedRules:
    """The rules of an engine in its verification.

    Parameters
    ----------
    sites : sequence of RewrittenRow
        The attentions that kernels compute.
    rule_for : callable
        Maps a site's path to its TracedRule, or to None.
    """

    def __init__(self, sites: Sequence[RewrittenRow], rule_for: Callable):
        self.rows = {site.site: site for site in sites if site.rule is not None}
        self.rules: dict[str, Rule] = {path: rule_for(path).rule for path in self.rows}
        self.maps: dict[str, torch.Tensor] = {}

    def __bool__(self):
        return bool(self.rows)

    @property
    def why_not(self) -> str | None:
        """Why the blocks cannot be compared, or None."""
        large = [named(path) for path, row in self.rows.items() if not row.returns_map]
        return f"the block map of {large[0]} is too large to be compared" if large else None

    def masks_found(self, found: Mapping[str, FoundBlocks], mask_for: Callable) -> Callable:
        """`mask_for`, which maps a site's path, sizes and first row to the user's mask there, with what rules found."""
        self.maps = {path: x.block_map.cpu() for path, x in found.items() if x.block_map is not None}

        def mask(path: str, sizes: tuple[int, int, int, int], first_row: int | None = None):
            if path not in self.rules:
                return mask_for(path, sizes, first_row)
            rule = self.rules[path]
            kept = block_sparse(self.maps[path], rule.block)
            return kept if rule.within is None else kept & rule.within

        return mask

    def compare(self, imported: ImportedModel, values: Callable, precision: torch.dtype | None) -> str:
        """Compare the blocks that were found with those of the rules in PyTorch; says for the report how they compare.

        `values` maps names of nodes of the exported program to their values in PyTorch, in the model's dtypes, where
        attentions keep what was found.  `precision` is that of the engine's products where it is not their dtype's.
        Raises VerificationError where blocks differ by more than near ties.
        """
        nodes = {node.name: node for node in imported.source.graph_module.graph.nodes}
        of_sites = {path: nodes.get(imported.site_nodes.get(path, "")) for path in self.rules}
        known = {
            path: node
            for path, node in of_sites.items()
            if node is not None and node.target is SDPA and _fits(node, self.rows[path].shape)
        }
        operands = iter(values([x.name for node in known.values() for x in node.args[:2]]))
        ties = 0
        for path, node in known.items():
            shape, scale = self.rows[path].shape, node.kwargs.get("scale")
            q, k = _as_kernels_see(next(operands), next(operands), shape)
            close = CLOSE[precision or q.dtype]
            ties += near_ties(path, self.rules[path], self.maps[path], *for_rule(q, k, scale), close)
        told = f"as PyTorch but for {ties} near ties" if ties else "as PyTorch"
        if rest := [named(path) for path in self.rules if path not in known]:
            whose = "whose queries and keys PyTorch's graph does not name"
            told = f"those of {', '.join(rest)} were not compared, {whose}" + (f"; others {told}" if known else "")
        return f"blocks that rules found: {told}"


def _fits(node: torch.fx.Node, shape: AttentionShape) -> bool:
    """Whether a node's queries and keys are those of an attention, but for heads of keys that are repeated."""
    row = shape.batch * shape.head_dim
    q_size, k_size = (x.meta["val"].numel() for x in node.args[:2] if isinstance(x, torch.fx.Node))
    return q_size == row * shape.heads * shape.q_len and k_size % (row * shape.kv_heads * shape.kv_len) == 0


def _as_kernels_see(q, k, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, H, Sq, D) and k (B, Hkv, Skv, D), heads not repeated."""
    q = q.reshape(shape.batch, shape.heads, shape.q_len, shape.head_dim)
    k = k.reshape(shape.batch, -1, shape.kv_len, shape.head_dim)
    return q, k[:, :: k.shape[1] // shape.kv_heads]
