"""The search spaces of an attention: the kernels and configurations that are worth measuring for a mask."""

from dataclasses import replace

import tvm

from tir_kernels.attention.block_wise import cost as cuda_cost
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.attention.select import MaskLike, compile_mask
from tir_kernels.masks.block_counts import FINEST
from tir_kernels.masks.token_strides import find_token_stride
from tir_kernels.tuning.template_space import TemplateSpace


def mask_digest(problem: AttentionProblem, mask: MaskLike | None) -> str:
    """A digest by which an attention workload identifies a mask: equal for masks that keep the same elements."""
    return compile_mask(mask, problem, FINEST).digest


def attention_spaces(
    problem: AttentionProblem, mask: MaskLike | None, target: tvm.target.Target
) -> list[TemplateSpace]:
    """The spaces of all templates that compute an attention.

    For the block-wise CUDA kernel they hold the tiles that are the best for some problem, with any number of stages.
    If the mask keeps tokens at a stride, they also hold these tiles with blocks of such tokens.
    """
    spaces = []
    for template in templates_for(target):
        if template.unsupported(problem, target) is None:
            configs = template.configs(problem, target)
            if template is block_wise_cuda:
                configs = _worth_measuring(configs, problem, mask)
            spaces.append(TemplateSpace(template, tuple(configs)))
    return spaces


def _worth_measuring(configs: list, problem: AttentionProblem, mask: MaskLike | None) -> list:
    usual = [config for config in configs if cuda_cost.is_candidate(config)] or configs[:1]
    found = None if mask is None else find_token_stride(compile_mask(mask, problem, FINEST))
    if found is None or found.near:
        return usual
    return [*usual, *(replace(config, token_stride=found.stride) for config in usual)]
