"""Which mask each attention site of a model gets: the model's own, and the user's by module path."""

import fnmatch
import functools
import operator
from collections.abc import Mapping

import torch

from relax_passes.rewrite_masked_attention import AttentionSite
from stof_tvm import masks
from tir_kernels.errors import MaskError


class SiteMasks:
    """The `mask=` argument of `build`, resolved site by site.

    Parameters
    ----------
    given : Mask, mapping from path pattern to Mask, or None
        One Mask applies to every attention.  A pattern ("encoder.layer.*.attention", shell wildcards, "*" also matches
        dots) applies to every attention in a module that it matches; where several match, the last one counts.

    The user's mask only ever restricts: where the model masks by itself (causal, a constant mask), both hold.
    """

    def __init__(self, given):
        if given is not None and not isinstance(given, masks.Mask | Mapping):
            raise MaskError(f"mask= takes a Mask or a dict from module path to Mask, got {type(given).__name__}")
        self.by_pattern = dict(given) if isinstance(given, Mapping) else {} if given is None else {"*": given}
        self.must_match = isinstance(given, Mapping)
        for pattern, mask in self.by_pattern.items():
            if not isinstance(pattern, str) or not isinstance(mask, masks.Mask):
                raise MaskError(f"mask={{{pattern!r}: {mask!r}}}: keys are module paths and values are Masks")

    def check(self, sites) -> None:
        """MaskError for a mask that reaches none of the model's attentions, `sites` being the report's rows."""
        paths = [site["site"] for site in sites]
        for pattern in self.by_pattern:
            if any(_matches(pattern, path) for path in paths):
                continue
            if self.must_match and sites:
                known = ", ".join(repr(path) for path in paths)
                raise MaskError(f"mask path {pattern!r} matches no attention of the model; there are: {known}")
            where = f"for {pattern!r} " if self.must_match else ""
            raise MaskError(
                f"the mask {where}reaches no attention: none was recognised in the model. What is looked for is "
                "F.scaled_dot_product_attention, nn.MultiheadAttention, or softmax(q @ k.mT * scale + bias) @ v "
                "written out, with nothing else between the two products"
            )

    def given_for(self, path: str):
        """The user's mask for the attention at a path, or None."""
        matching = [mask for pattern, mask in self.by_pattern.items() if _matches(pattern, path)]
        return matching[-1] if matching else None

    def __call__(self, site: AttentionSite):
        """The mask of a site, or None where nothing masks it."""
        parts = []
        if site.causal:
            parts.append(masks.causal(align=site.causal))
        if site.constant is not None:
            parts.append(masks.from_tensor(torch.from_numpy(site.constant)))
        if (given := self.given_for(site.path)) is not None:
            parts.append(given)
        return functools.reduce(operator.and_, parts) if parts else None


def _matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the site's module or a module that it is in."""
    steps = path.partition("#")[0].split(".")
    owners = [".".join(steps[:n]) for n in range(1, len(steps) + 1)]
    return any(fnmatch.fnmatchcase(owner, pattern) for owner in (path, *owners))


def listed(sites) -> str:
    """Rows of the report with their reasons, for a message."""
    return "; ".join(f"{site['site'] or '(the model)'}: {site['reason']}" for site in sites)
