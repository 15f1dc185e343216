"""What masks and rules keep of each attention of a model, seen while it runs in PyTorch."""

from dataclasses import dataclass

import torch

from relax_passes.attention.site_names import named
from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.quality.capture import call_of, captured, check_model
from stof_tvm.masks.quality.recall import kept_shares
from stof_tvm.masks.quality.weights import Attention
from stof_tvm.masks.runtime.rule import for_rule
from stof_tvm.site_masks import SiteMasks
from tir_kernels.errors import InputError, MaskError


@dataclass(frozen=True, eq=False)
class AttentionKept:
    """What is kept of one attention, of what the model itself keeps there.

    Attributes
    ----------
    path : str
        The attention, as `build` names it; "" is the model's own.
    mask : str
        The mask or rule, as it prints itself; "" where none was given.
    recall : Tensor
        Float64 (B, H): the softmax mass that is kept, averaged over rows.
    density : Tensor
        Float64 (B, H): the share of the pairs that is kept.
    """

    path: str
    mask: str
    recall: torch.Tensor
    density: torch.Tensor


class ExplainedAttention(tuple[AttentionKept, ...]):
    """The attentions of a model in the order of their calls; it prints itself as a table."""

    def __str__(self):
        lines = [f"{'kept softmax':>12} {'worst head':>10} {'pairs':>6}  attention, mask"]
        for row in self:
            numbers = f"{float(row.recall.mean()):>12.1%} {float(row.recall.min()):>10.1%}"
            what = f"{named(row.path)}, {row.mask}" if row.mask else f"{named(row.path)}, no mask given"
            lines.append(f"{numbers} {float(row.density.mean()):>6.1%}  {what}")
        return "\n".join(lines)


def explain_attention(model: torch.nn.Module, sample, mask, rows: int | None = None) -> ExplainedAttention:
    """How much of each attention's softmax a mask or a rule would keep, before an engine is built with it.

    The model runs once in PyTorch, in evaluation mode and without masks of the call: each attention sees the queries
    and keys that it has without them.

    Parameters
    ----------
    model : Module
        Whose attentions are calls of F.scaled_dot_product_attention, those of nn.MultiheadAttention included.
    sample : tuple, dict or Tensor
        One call of the model, tensors of the shapes and dtypes that it takes.
    mask : mask, Rule, or dict of them by module path
        As `build` takes it.
    rows : int, optional
        Look at that many evenly spaced query rows of each attention instead of all.

    Raises
    ------
    MaskError
        A mask that is none, does not fit an attention; a path that matches none.
    InputError
        A sample that is no call; no model, or one without such attentions.
    UnsupportedError
        An attention with dropout, or in a module that the model holds under several names.
    """
    rows = None if rows is None else check_int("rows", rows, least=1)
    if mask is None:
        raise MaskError("mask is None: explain_attention says what a mask or a rule keeps; give one, or some by path")
    check_model(model)
    given, found = SiteMasks(mask, takes_rules=True), []

    def receive(path: str, attention: Attention, out: torch.Tensor) -> None:
        found.append(_kept(given, path, attention, rows))

    args, kwargs = call_of(sample)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), captured(model, receive):
            model(*args, **kwargs)
    finally:
        for module in training:
            module.training = True
    if not found:
        raise InputError(f"{type(model).__name__} computes no attention by F.scaled_dot_product_attention")
    given.check_paths([row.path for row in found])
    return ExplainedAttention(found)


def _kept(given: SiteMasks, path: str, attention: Attention, rows: int | None) -> AttentionKept:
    mask, text = _mask_at(given, path, attention)
    if mask is None:
        ones = torch.ones(attention.sizes[:2], dtype=torch.float64)
        return AttentionKept(path, "", ones, ones)
    return AttentionKept(path, text, *kept_shares(attention, mask, rows=rows))


def _mask_at(given: SiteMasks, path: str, attention: Attention) -> tuple[Mask | None, str]:
    """What is kept of an attention by the mask or the rule that was given for it, and how that prints itself."""
    rule = given.rule_for(path)
    if rule is not None:
        return rule.rule.mask(*for_rule(attention.q, attention.k, attention.scale)), repr(rule)
    mask = given.given_for(path, attention.sizes)
    return mask, "" if mask is None else repr(mask)
