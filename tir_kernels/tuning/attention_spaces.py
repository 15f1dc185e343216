"""The search spaces of an attention: the kernels and configurations that are worth measuring for a mask."""

from dataclasses import replace

import tvm

from tir_kernels.attention.mask_forms import MaskLike, compile_mask
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.attention.template import AttentionTemplate
from tir_kernels.masks.block_counts import FINEST
from tir_kernels.masks.token_strides import find_token_stride
from tir_kernels.tuning.template_space import TemplateSpace


def mask_digest(problem: AttentionProblem, mask: MaskLike | None) -> str:
    """A digest by which an attention workload identifies a mask: equal for masks that keep the same elements."""
    return compile_mask(mask, problem, FINEST).digest


def attention_spaces(
    problem: AttentionProblem, mask: MaskLike | None, target: tvm.target.Target
) -> list[TemplateSpace[AttentionTemplate]]:
    """A space for each template that computes an attention, of the configurations that it says are worth measuring.

    If all distances that the mask keeps are multiples of a stride, templates that take token strides have each
    configuration a second time, with that token stride.
    """
    spaces = []
    for template in templates_for(target):
        if template.unsupported(problem, target) is None:
            configs = template.worth_measuring(template.configs(problem, target))
            if template.TAKES_TOKEN_STRIDES:
                configs += _strided(configs, problem, mask)
            spaces.append(TemplateSpace(template, tuple(configs)))
    return spaces


def _strided(configs: list, problem: AttentionProblem, mask: MaskLike | None) -> list:
    """The configurations with the stride that divides all distances that the mask keeps; [] if there is none."""
    found = None if mask is None else find_token_stride(compile_mask(mask, problem, FINEST))
    if found is None or found.near:
        return []
    return [replace(config, token_stride=found.stride) for config in configs]
