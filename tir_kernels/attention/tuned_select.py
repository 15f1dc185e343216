"""The choice of an attention's kernel with a tuning log: the fastest measured one, else the model's choice."""

from dataclasses import replace
from typing import Protocol

from tir_kernels.attention.block_wise import cost as cuda_cost
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import (
    Choice,
    MaskLike,
    best_block_wise,
    choose,
    compile_mask,
    parts_at,
    predict_us,
)
from tir_kernels.masks.block_counts import FINEST, FineMask
from tir_kernels.masks.token_strides import find_token_stride
from tir_kernels.tuned_config import TunedConfig


class Tuned(Protocol):
    """The interface of a tuning log that choosing needs."""

    def attention(self, problem: AttentionProblem, mask: MaskLike | None) -> TunedConfig | None:
        """The fastest that was measured for a problem and a mask, None where nothing was."""
        ...


def choose_tuned(problem: AttentionProblem, mask: MaskLike | None, target, tuned: Tuned | None) -> Choice:
    """The measured choice for a problem and mask, or the model's choice without a measured one.

    A mask may be computed in two parts, each with a configuration of its own.  If the whole and both parts were
    measured, their times decide; otherwise the model does.  Raises as `choose` does.
    """
    modelled = choose(problem, mask, target)
    if tuned is None:
        return modelled
    whole = _measured(problem, mask, target, tuned)
    parts = [_measured(*part, target, tuned) for part in attention_parts(problem, mask, target)]
    if whole is not None and parts and None not in parts:
        return min(whole, _joined(*parts), key=lambda choice: choice.measured_us)
    if modelled.first is None:
        return modelled if whole is None else whole
    return _joined(*(tuned_part or part for tuned_part, part in zip(parts, _apart(modelled))))


def attention_parts(
    problem: AttentionProblem, mask: MaskLike | None, target
) -> list[tuple[AttentionProblem, MaskLike]]:
    """The two parts of a mask with a window and tokens at a stride; [] for any other mask."""
    if mask is None or block_wise_cuda.TARGET_KIND != target.kind.name or block_wise_cuda.unsupported(problem, target):
        return []
    found = find_token_stride(best_block_wise(problem, mask, target).mask)
    return parts_at(problem, mask, found.near) if found is not None and found.near else []


def _measured(problem: AttentionProblem, mask: MaskLike | None, target, tuned: Tuned) -> Choice | None:
    found = tuned.attention(problem, mask)
    if found is None:
        return None
    template, config = found.template, found.config
    stride = getattr(config, "token_stride", 1)
    compiled = compile_mask(mask, problem, (config.block_m, config.block_n), stride)
    if template is block_wise_cuda:
        fine = FineMask(compile_mask(mask, problem, FINEST, stride))
        us = cuda_cost.predict_us(problem, config, fine, str(target.attrs["arch"]))
    else:
        us = predict_us(template, problem, compiled, target)
    return Choice(template, config, problem, compiled, us, found.reason, measured_us=found.us)


def _apart(choice: Choice) -> list[Choice]:
    """The launches of a choice in two parts, each with its own predicted time."""
    first, rest = choice.launches
    return [first, replace(rest, first=None, predicted_us=rest.predicted_us - first.predicted_us)]


def _joined(first: Choice, rest: Choice) -> Choice:
    measured = None
    if first.measured_us is not None and rest.measured_us is not None:
        measured = first.measured_us + rest.measured_us
    reasons = [part.reason or f"predicted {part.predicted_us:.0f} µs" for part in (first, rest)]
    return replace(
        rest,
        predicted_us=first.predicted_us + rest.predicted_us,
        measured_us=measured,
        reason=f"in two parts: {'; '.join(reasons)}",
        first=first,
    )
