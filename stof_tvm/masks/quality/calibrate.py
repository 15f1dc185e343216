"""The mask or rule of each head of a model that loses least on samples, within a budget of pairs."""

import contextlib
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.quality.assignment import Assignment, of_heads
from stof_tvm.masks.quality.budget import allocate
from stof_tvm.masks.quality.capture import call_of, captured, check_model
from stof_tvm.masks.quality.effects import Effects, measure
from stof_tvm.masks.quality.offers import Offers
from stof_tvm.masks.quality.weights import Attention
from stof_tvm.masks.runtime.rule import Rule
from tir_kernels.errors import InputError, MaskError

METHODS = ("error", "gradient")


def calibrate(
    model: torch.nn.Module,
    samples: Iterable,
    budget: float,
    method: str = "error",
    candidates: Iterable[Mask | Rule] | str | Mapping[str, Iterable[Mask | Rule] | str | None] | None = None,
    *,
    loss: Callable | None = None,
    rows: int | None = None,
) -> Assignment:
    """The masks or rules, one for each head, that lose least on samples while they keep a share of the pairs.

    The model runs in PyTorch, in evaluation mode, and every call of `scaled_dot_product_attention` is looked at, under
    the path by which `build` knows it.  What each candidate would change there is summed over the samples, the change
    of one attention at a time; the budget is then spread over all heads, where it lowers the sum of losses most (a
    choice that is at most one step from the best).

    Parameters
    ----------
    model : Module
        Whose attentions are calls of F.scaled_dot_product_attention, those of nn.MultiheadAttention included.
    samples : sequence
        Calls of the model: tuples of arguments, dicts of keyword arguments, or single tensors, of any shapes and dtypes
        that it takes.  A mask is of one length at its best: take samples of that length.
    budget : float
        Pairs of a query and a key that are kept, over those that the model's own masks keep, summed over all heads: 1
        is the model as it is.
    method : str
        "error": the loss is the squared change of the attention's result, relative to the result.  "gradient": the
        change of the model's loss in first order, which tells attentions apart that matter from those that do not; it
        needs `loss`, and memory for a backward pass.
    candidates : sequence of Mask and Rule, "rules", or mapping from path pattern to either, optional
        What heads choose from, beside everything.  Default: windows of 1/32 to 1/2 of the keys with the first keys;
        where attention is causal, also the columns and diagonals that hold most of each head's softmax in the first
        sample.  Rules of `masks.runtime`, all of one block, count with what they keep of each sample, and are asked
        again in each call of what is built with them.  "rules": what MInference's search has, spans with sinks, columns
        and diagonals that are found in each call, and blocks.  A mapping has patterns as `build(mask=)` does, and None
        for the default; attentions that none matches stay as they are, and the budget is of the others.
    loss : function, optional
        From what the model returns to a scalar, for "gradient".
    rows : int, optional
        Look at that many evenly spaced query rows of each attention instead of all.

    Raises
    ------
    InputError
        A model without such attentions, samples that are no calls, an unknown method, a budget outside of 0 … 1 or
        below what the sparsest candidates keep; NaN; samples of different lengths whose attention is causal, without
        candidates.
    MaskError
        Candidates that are neither masks nor rules of one head, rules of several blocks, what does not fit an
        attention, or keeps nothing of it; a pattern that matches no attention.
    UnsupportedError
        An attention with dropout, or in a module that the model holds under several names.
    """
    if method not in METHODS:
        raise InputError(f"method={reprlib.repr(method)} must be 'error' or 'gradient'")
    if (method == "gradient") != (loss is not None):
        raise InputError("method='gradient' needs loss=, a function of the model's result; 'error' takes none")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise InputError(f"budget={reprlib.repr(budget)} must be a number above 0 and at most 1")
    rows = None if rows is None else check_int("rows", rows, least=1)
    check_model(model)
    if isinstance(samples, torch.Tensor | Mapping | str) or not isinstance(samples, Iterable):
        raise InputError(f"samples is a list of calls of the model, got {type(samples).__name__}")
    survey = _Survey(Offers(candidates), rows)
    count = 0
    for sample in samples:
        _run(model, sample, survey, loss)
        count += 1
    if not count:
        raise InputError("samples is empty: calibrate needs at least one call of the model")
    if not survey.paths:
        raise InputError(
            f"{type(model).__name__} computes no attention by F.scaled_dot_product_attention (of transformers: "
            'attn_implementation="sdpa"; of nn.MultiheadAttention: need_weights=False)'
        )
    survey.offers.check_reached(survey.paths)
    return survey.assigned(float(budget))


class _Survey:
    """The options of each head by path, and what they do, summed over samples."""

    def __init__(self, offers: Offers, rows: int | None):
        self.offers, self.rows = offers, rows
        self.paths: dict[str, None] = {}  # of all attentions
        self.options: dict[str, list[list[Mask | Rule]]] = {}
        self.lengths: dict[str, tuple[int, int]] = {}  # of the sample that the options are from
        self.effects: dict[str, Effects] = {}

    def add(self, path: str, attention: Attention, gradient: torch.Tensor | None = None) -> None:
        self.paths[path] = None
        if not self.offers.reaches(path):
            return
        heads, *lengths = attention.sizes[1:]
        if path not in self.options:
            self.lengths[path] = lengths[0], lengths[1]
            self.options[path] = self.offers.options(path, attention, self.rows)
        elif len(self.options[path]) != heads:
            raise InputError(
                f"attention {path!r} has {len(self.options[path])} heads in one sample, {heads} in another"
            )
        elif self.offers.finds_lines(path, attention) and self.lengths[path] != tuple(lengths):
            raise InputError(
                f"attention {path!r} has {self.lengths[path]} queries and keys in one sample, {tuple(lengths)} in "
                "another: columns and diagonals that are found in one do not fit the other; give candidates="
            )
        try:
            found = measure(attention, self.options[path], gradient, self.rows)
        except MaskError as error:
            raise self.offers.told(path, attention, error) from None
        self.offers.check(path, attention)
        if path in self.effects:
            self.effects[path] += found
        else:
            self.effects[path] = found

    def assigned(self, budget: float) -> Assignment:
        """The masks and rules that the budget allows."""
        where = [(path, h) for path, effects in self.effects.items() for h in range(len(effects.whole))]
        losses = [self.effects[path].loss[h].tolist() for path, h in where]
        costs = [self.effects[path].kept[h].tolist() for path, h in where]
        for (path, _), sums in zip(where, losses, strict=True):
            if not all(map(math.isfinite, sums)):
                raise InputError(f"attention {path!r} has results or gradients that are NaN or infinite")
        whole = sum(float(effects.whole.sum()) for effects in self.effects.values())
        least = sum(map(min, costs)) / whole
        if least > budget:
            raise InputError(f"budget={budget:.4g}: the sparsest candidates of all heads keep {least:.4g} of the pairs")
        chosen = allocate(losses, costs, budget * whole)
        masks: dict[str, list[Mask | Rule]] = {path: [] for path in sorted(self.effects, key=_depth)}
        for (path, h), n in zip(where, chosen, strict=True):
            masks[path].append(self.options[path][h][n])
        kept = sum(cost[n] for cost, n in zip(costs, chosen, strict=True))
        return Assignment(
            {
                path: of_heads(of[:1] if all(one is of[0] or one == of[0] for one in of) else of)
                for path, of in masks.items()
            },
            density=kept / whole,
            loss=sum(loss[n] for loss, n in zip(losses, chosen, strict=True)),
        )


def _depth(path: str) -> tuple[int, str]:
    """What puts a path behind those of modules that contain it, whose masks reach it too: the last one counts."""
    return path.count("."), path


def _run(model: torch.nn.Module, sample, survey: _Survey, loss: Callable | None) -> None:
    """Add one call of the model to the survey."""
    args, kwargs = call_of(sample)
    seen: list[tuple[str, Attention, torch.Tensor]] = []

    def receive(path, attention, out):
        if loss is None:
            survey.add(path, attention)
            return
        if not out.requires_grad:
            out.requires_grad_()
        out.retain_grad()
        seen.append((path, attention, out))

    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.enable_grad() if loss is not None else torch.no_grad(), captured(model, receive):
            result = model(*args, **kwargs)
        if loss is not None:
            _backward(model, loss(result))
    finally:
        for module in training:
            module.training = True
    for path, attention, out in seen:
        if out.grad is not None:  # nothing of the loss depends on it otherwise
            survey.add(path, attention, out.grad)
        else:
            survey.add(path, attention, torch.zeros_like(out))


def _backward(model: torch.nn.Module, value) -> None:
    """Gradients of a loss; those of the model's parameters stay what they were."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError("loss must return a tensor of one element that depends on the model's attentions")
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    with contextlib.ExitStack() as stack:
        for parameter, gradient in before:
            stack.callback(setattr, parameter, "grad", gradient)
            parameter.grad = None
        value.backward()
