"""The mask of each attention site of a model: the model's own and the user's by module path."""

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.site_names import THE_MODEL, matches, named
from stof_tvm import masks
from stof_tvm.given_masks import check_given, given_mask, opened
from stof_tvm.masks.canvas.wanted_order import in_tile_order
from stof_tvm.masks.part import Part, heads_of
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.windows import reach
from stof_tvm.rules.traced import TracedRule
from tir_kernels.errors import MaskError, NotRewrittenError, UnsupportedError
from tir_kernels.report_rows import RewrittenRow, SiteRow

EVERYTHING = masks.everything()  # the static part of a rule without one


class SiteMasks:
    """The `mask=` argument of `build`, resolved site by site.

    Parameters
    ----------
    given : mask, mapping from path pattern to mask, the name of a .json file of one, or None
        A Mask, bool tensor or array, BlockMask or mask_mod function, as `sparse_attention` takes them.  One mask
        applies to every attention.  A pattern ("encoder.layer.*.attention", shell wildcards, "*" also matches
        dots) applies to every attention in a module that it matches; where several match, the last one counts.
        The model's own attentions go by "" or, as messages and reports name them, "(the model)".
    takes_rules : bool
        A rule may stand for a mask: its static part is the mask here, and `rule_for` gives the rule.
    dense : str
        What an error says of attentions that have a mask and stay dense.

    The user's mask only ever restricts: where the model masks by itself (causal, a constant mask), both hold.
    """

    def __init__(self, given, takes_rules: bool = False, dense: str = ", where the given mask cannot be applied"):
        given = opened(given)
        self._dense = dense
        self.must_match = isinstance(given, Mapping)
        by_pattern = dict(given) if self.must_match else {} if given is None else {"*": given}
        self.by_pattern = {"" if pattern == THE_MODEL else pattern: mask for pattern, mask in by_pattern.items()}
        self.rules: dict[str, Rule] = {}
        self._traced: dict = {}  # what TracedRule knows
        if takes_rules:
            self.rules = {pattern: mask for pattern, mask in self.by_pattern.items() if isinstance(mask, Rule)}
            parts = {pattern: EVERYTHING if x.within is None else x.within for pattern, x in self.rules.items()}
            self.by_pattern |= parts
        self._made = {}  # (pattern, sizes) -> Mask
        if self.must_match and not by_pattern:
            raise MaskError('mask={} names no attention: leave mask out, or give {"encoder.layer.*": mask}')
        for pattern, mask in self.by_pattern.items():
            if not isinstance(pattern, str):
                raise MaskError(f"mask={{{pattern!r}: …}}: keys are module paths, got {type(pattern).__name__}")
            try:
                check_given(mask)
            except MaskError as error:
                raise MaskError(f"mask for {named(pattern)}: {error}" if self.must_match else str(error)) from None

    def refuse_rules(self, why: str) -> None:
        """UnsupportedError if a rule is among the masks; `why` says what it does not go with."""
        for rule in self.rules.values():
            raise UnsupportedError(f"{rule!r} finds its blocks from q and k in each call, and {why}")

    def rule_for(self, path: str) -> TracedRule | None:
        """The rule that finds what the attention at a path keeps of its mask; None where there is none."""
        pattern = self.pattern_of(path)
        rule = None if pattern is None else self.rules.get(pattern)
        return None if rule is None else TracedRule(rule, path, self._traced)

    def check(self, sites: Sequence[SiteRow]) -> None:
        """MaskError for a mask that reaches none of the model's attentions, `sites` being the report's rows."""
        self.check_paths([site.site for site in sites])

    def check_paths(self, paths: Sequence[str]) -> None:
        """The same of the attentions' paths."""
        for pattern in self.by_pattern:
            if any(matches(pattern, path) for path in paths):
                continue
            if self.must_match and paths:
                known = ", ".join(named(path) for path in paths)
                raise MaskError(f"mask path {named(pattern)} matches no attention of the model; there are: {known}")
            where = f"for {named(pattern)} " if self.must_match else ""
            raise MaskError(
                f"the mask {where}reaches no attention: none was recognised in the model. What is looked for is "
                "F.scaled_dot_product_attention, nn.MultiheadAttention, or softmax(q @ k.mT * scale + bias) @ v "
                "written out, with nothing else between the two products"
            )

    def check_reached(self, sites: Sequence[SiteRow], strict: bool = False) -> None:
        """MaskError for a mask that reaches no attention; NotRewrittenError for an attention that stays dense although
        the user gave it a mask.  With `strict`, every attention that stays dense is an error.

        `sites` are the report's rows.  The dense computation knows the model's own masks only, so going on would drop
        the user's.
        """
        self.check(sites)
        dense = [site for site in sites if not site.rewritten]
        masked = [site for site in dense if self.is_given(site.site)]
        for found, meaning in ((masked, self._dense), (dense, "")):
            if found and (strict or found is masked):
                raise NotRewrittenError(f"{len(found)} attention(s) stay dense{meaning}: {listed(found)}")

    def is_given(self, path: str) -> bool:
        """Whether the user gave a mask for the attention at a path."""
        return self.pattern_of(path) is not None

    def given_for(self, path: str, sizes: tuple[int, int, int, int], first_row: int | None = None):
        """The user's mask for the attention at a path, of sizes (B, H, Sq, Skv); None where there is none.

        With `first_row` it is the Sq rows from there on of the mask at (Skv, Skv).  MaskError where the mask does not
        fit the sizes.
        """
        pattern = self.pattern_of(path)
        if pattern is None:
            return None
        if first_row is not None:
            batch, heads, _, kv_len = sizes
            whole = self.given_for(path, (batch, heads, kv_len, kv_len))
            return None if whole is None else Part(whole, first_row, 0, kv_len)
        if (pattern, sizes) not in self._made:
            try:
                self._made[pattern, sizes] = given_mask(self.by_pattern[pattern], sizes).make()
            except MaskError as error:
                raise MaskError(f"attention {named(path)}: {error}") from None
        return self._made[pattern, sizes]

    def order_for(self, path: str, sizes: tuple[int, int, int, int]) -> np.ndarray | None:
        """The order of tokens in which the user's mask for the attention at a path has fuller blocks, int64 (tokens,).

        None where it knows none, a rule looks at the tokens, or it is of another number of tokens: an error later.
        """
        if self.rule_for(path) is not None or (given := self.given_for(path, sizes)) is None:
            return None
        found = in_tile_order(given)
        return None if found is None or len(found[0]) != sizes[2] else found[0]

    def reach_for(self, path: str, sizes: tuple[int, int, int, int]) -> tuple[float, float] | None:
        """(how far before, how far behind) its query the user's mask for the attention at a path keeps a key.

        Infinity where it keeps all that way, as without a mask; None where it does not go by distance alone, or not at
        all lengths alike.
        """
        given = self.given_for(path, sizes)
        return (math.inf, math.inf) if given is None else reach(given, sizes[3])

    def pattern_of(self, path: str) -> str | None:
        matching = [pattern for pattern in self.by_pattern if matches(pattern, path)]
        return matching[-1] if matching else None

    def __call__(self, site: AttentionSite):
        """The mask of a site, or None where nothing masks it."""
        parts = []
        if site.causal:
            parts.append(masks.causal(align=site.causal))
        if site.constant is not None:
            parts.append(masks.from_tensor(torch.from_numpy(site.constant)))
        batch, heads, q_len, kv_len = site.sizes
        first_head, all_heads = site.heads or (0, heads)
        given = self.given_for(site.path, (batch, all_heads, q_len, kv_len), site.first_row)
        if given is not None and site.reordered and (found := in_tile_order(given)) is not None:
            given = found[1]
        if given is not None and given is not EVERYTHING:
            parts.append(given if site.heads is None else heads_of(given, first_head, heads))
        return functools.reduce(operator.and_, parts) if parts else None


def sizes_of(site: RewrittenRow) -> tuple[int, int, int, int]:
    """(B, H, Sq, Skv) of the user's mask for an attention, from its row of the report."""
    shape = site.mask_shape
    return shape.batch, shape.heads, shape.kv_len if shape.has_positions else shape.q_len, shape.kv_len


def listed(sites: Iterable[SiteRow]) -> str:
    """Rows of the report with their reasons, for a message."""
    return "; ".join(f"{site.site or THE_MODEL}: {site.reason}" for site in sites)
