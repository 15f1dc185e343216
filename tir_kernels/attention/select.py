"""The choice of the kernel and the configuration for an attention: the fastest as measured, else as predicted.

Times in a tuning log decide.  Where there are none, each template predicts the times of its configurations
(`AttentionTemplate.worth_predicting`).  So short inputs, and rows with few kept elements in many blocks, go row-wise,
and everything else block-wise.  This is what the paper's Eq. 1 intends; as printed, it never chooses row-wise.

If most elements of the listed blocks are masked and the kept distances have a common divisor, templates that take token
strides are also tried with blocks of every stride-th token: for the whole mask, or for the part beyond a window
(token_strides.py).
"""

from dataclasses import dataclass, replace
from typing import Protocol, cast

from tir_kernels.attention.mask_forms import MaskForms, MaskLike
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.attention.template import AttentionConfig, AttentionTemplate
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.token_strides import TokenStride, find_token_stride
from tir_kernels.template import Operands
from tir_kernels.tuned_config import TunedConfig


class Tuned(Protocol):
    """What the choice of a kernel needs of a tuning log."""

    def attention(self, problem: AttentionProblem, mask: MaskLike | None) -> TunedConfig | None:
        """The fastest configuration that was measured for a problem and a mask, or None."""
        ...


@dataclass(frozen=True)
class Choice:
    """A kernel template, its configuration, the problem and the mask compiled for it, and why.

    `predicted_us` is the model's time in microseconds, on LLVM for one processor; it serves to rank candidates.
    `measured_us` comes from a tuning log.  `first`, if any, is the choice for another part of the mask.  Its kernel
    runs first, and this kernel continues from the result; `predicted_us` and `measured_us` are then times of both.
    """

    template: AttentionTemplate
    config: AttentionConfig
    problem: AttentionProblem
    mask: BlockSparseMask
    predicted_us: float
    reason: str
    first: "Choice | None" = None
    measured_us: float | None = None

    @property
    def launches(self) -> "list[Choice]":
        """The choices whose kernels are launched, in order."""
        return [*([] if self.first is None else self.first.launches), self]

    @property
    def us(self) -> float:
        """The measured time if there is one, else the predicted time."""
        return self.predicted_us if self.measured_us is None else self.measured_us

    def operands(self, target) -> Operands:
        """The mask's arrays that this kernel takes, and its workspace; `first` has operands of its own."""
        return self.template.operands(self.problem, self.config, target, self.mask)

    @property
    def label(self) -> str:
        """Kernels and configurations, as reports show them."""
        return " + ".join(f"{launch.template.NAME} {launch.config.label}" for launch in self.launches)

    @property
    def density(self) -> float:
        """Kept elements over all elements, averaged over batch entries and heads."""
        return sum(launch.mask.density for launch in self.launches)

    @property
    def scheduled_density(self) -> float:
        """Elements that the kernels compute, padding included, over all elements, averaged over patterns."""
        masks = [launch.mask for launch in self.launches]
        listed = sum(len(m.load_col_idx) / m.n_patterns * m.block_m * m.block_n for m in masks)
        return listed / (self.problem.mask_rows * self.problem.kv_len)


def choose(
    problem: AttentionProblem,
    mask: MaskLike | None,
    target,
    kernel: str | None = None,
    tuned: Tuned | None = None,
    *,
    for_any_mask: bool = False,
) -> Choice:
    """The template and configuration with the least time.

    Parameters
    ----------
    mask
        None keeps everything.
    kernel
        Only consider the template of this name, by prediction.
    tuned
        Measured times, which take precedence over predicted ones.  A mask may be computed in parts, each with a
        configuration of its own.  Measured times decide whether it is, if they are known for the whole mask and for all
        parts; else predicted times decide.
    for_any_mask
        Choose one kernel that computes the problem with any other mask, too: blocks of consecutive tokens, one launch.

    Raises UnsupportedError, with each template's reason, where none can compute the problem; MaskError for a mask that
    does not fit the problem or keeps nothing.
    """
    in_order = for_any_mask or problem.block_map is not None
    predicted = _choose_predicted(problem, mask, target, kernel, may_stride=not in_order)
    if tuned is None or kernel is not None:
        return predicted
    whole = _measured(problem, mask, target, tuned)
    if for_any_mask:
        return predicted if whole is None or whole.config.token_stride > 1 else whole
    parts = [_measured(*part, target, tuned) for part in attention_parts(problem, mask, target)]
    known = [part for part in parts if part is not None]
    if whole is not None and parts and len(known) == len(parts):
        return min(whole, _joined(*known), key=lambda choice: choice.us)
    if predicted.first is None:
        return predicted if whole is None else whole
    return _joined(*(tuned_part or part for tuned_part, part in zip(parts, _apart(predicted))))


def attention_parts(
    problem: AttentionProblem, mask: MaskLike | None, target
) -> list[tuple[AttentionProblem, MaskLike]]:
    """The two parts of a mask that keeps a window, and beyond it multiples of a stride; [] for any other mask.

    So it is for a problem with a bias: where it fills all of a row with a number such as -1e9, the log-sum-exp of the
    first part, by which the second continues, does not tell how many keys the row has.
    """
    if mask is None or problem.block_map is not None or problem.bias_shape is not None:
        return []
    forms = MaskForms(problem, mask)
    able = [t for t in templates_for(target) if t.TAKES_TOKEN_STRIDES and t.unsupported(problem, target) is None]
    found = _token_stride([_best(template, forms, target) for template in able])
    return _parts_at(problem, mask, found.near) if found is not None and found.near else []


def _choose_predicted(
    problem: AttentionProblem, mask: MaskLike | None, target, kernel: str | None, may_stride: bool
) -> Choice:
    choices, refusals, forms = [], [], MaskForms(problem, mask)
    for template in templates_for(target, kernel):
        reason = template.unsupported(problem, target)
        if reason is None:
            choices.append(_best(template, forms, target))
        else:
            refusals.append(f"{template.NAME}: {reason}")
    if not choices:
        raise UnsupportedError(f"no attention kernel for this problem ({'; '.join(refusals)}): {problem}")
    best, *others = sorted(choices, key=lambda choice: choice.predicted_us)
    best_us = best.predicted_us
    reason = f"predicted {best_us:.0f} µs"
    if may_stride and mask is not None:
        usual = [choice for choice in choices if choice.template.TAKES_TOKEN_STRIDES]
        strided = _choose_token_stride(usual, mask, target, kernel)
        if strided is not None and strided.predicted_us < best_us:
            return replace(strided, reason=f"predicted {strided.predicted_us:.0f} µs against {best_us:.0f} µs in order")
    if others:
        reason += f" against {others[0].predicted_us:.0f} µs {others[0].template.NAME}"
    elif kernel is not None:
        reason += ", asked for by name"
    else:
        reason += f", the only {target.kind.name} kernel" + (f" ({'; '.join(refusals)})" if refusals else "")
    return replace(best, reason=reason)


def _choose_token_stride(usual: list[Choice], mask: MaskLike, target, kernel: str | None) -> Choice | None:
    """The best choice with blocks of tokens at a stride; None if the mask has no stride.

    `usual` are the choices, with tokens in the usual order, of the templates that take strides.  The part within a
    window, if there is one, is computed first, in the usual order, by any template.
    """
    found = _token_stride(usual)
    if found is None:
        return None
    problem = usual[0].problem
    if found.near and problem.bias_shape is not None:  # see `attention_parts`
        return None
    near, far = _parts_at(problem, mask, found.near) if found.near else (None, (problem, mask))
    forms = MaskForms(*far, found.stride)
    able = [c.template for c in usual if c.template.unsupported(far[0], target) is None]
    rest = min((_best(t, forms, target) for t in able), key=lambda choice: choice.predicted_us)
    if near is None:
        return rest
    able = [t for t in templates_for(target, kernel) if t.unsupported(near[0], target) is None]
    first = min((_best(t, MaskForms(*near), target) for t in able), key=lambda choice: choice.predicted_us)
    return replace(rest, predicted_us=first.predicted_us + rest.predicted_us, first=first)


def _token_stride(usual: list[Choice]) -> TokenStride | None:
    """The stride that a mask has in the blocks of the best choice: it is found in a sample of their rows.

    Whoever divides a mask asks here, so that parts whose times were measured are those that are computed.
    """
    return find_token_stride(min(usual, key=lambda choice: choice.predicted_us).mask) if usual else None


def _parts_at(problem: AttentionProblem, mask: MaskLike, distance: int) -> list[tuple[AttentionProblem, MaskLike]]:
    """The problem and mask within a distance |i - j|, and those beyond it, which continue from the first's result.

    Only the second problem has the sink.
    """
    near, far = mask.split(distance)
    return [(replace(problem, gives_lse=True, sink_dtype=None), near), (replace(problem, continues=True), far)]


def _best(template: AttentionTemplate, forms: MaskForms, target) -> Choice:
    """The configuration of a template with the least predicted time, with the mask's tokens in the order of `forms`."""
    problem = forms.problem
    configs = template.worth_predicting(template.configs(problem, target))
    if forms.token_stride > 1:
        configs = [replace(config, token_stride=forms.token_stride) for config in configs]
    times = [template.predict_us(problem, config, target, forms) for config in configs]
    us, config = min(zip(times, configs), key=lambda pair: pair[0])
    return Choice(template, config, problem, forms.stored((config.block_m, config.block_n)), us, "")


def _measured(problem: AttentionProblem, mask: MaskLike | None, target, tuned: Tuned) -> Choice | None:
    untuned = problem.has_positions or problem.block_map is not None
    found = None if untuned else tuned.attention(problem, mask)
    if found is None:
        return None
    template, config = cast(AttentionTemplate, found.template), cast(AttentionConfig, found.config)
    forms = MaskForms(problem, mask, config.token_stride)
    us = template.predict_us(problem, config, target, forms)
    stored = forms.stored((config.block_m, config.block_n))
    return Choice(template, config, problem, stored, us, found.reason, measured_us=found.us)


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
