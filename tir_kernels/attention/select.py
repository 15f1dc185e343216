"""The choice of an attention's kernel and configuration: the least predicted time, without measuring.

On CUDA `block_wise/cost.py` predicts each of several configurations.  On LLVM the model counts arithmetic.  A
block-wise kernel computes every element of every listed block, at the rate of register-tiled products; a row-wise
kernel computes only kept elements, at the rate of dot products.  Each block or row that a kernel starts costs time as
well.  So short inputs, and rows with few kept elements in many blocks, go row-wise and everything else block-wise.  The
paper's Eq. 1 has the same aim, but as printed it never says row-wise.

If most elements of the listed blocks are masked and the kept distances have a common divisor, blocks of every stride-th
token are also tried on CUDA: for the whole mask, or for the part beyond a window (token_strides.py).
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

from tir_kernels.attention.block_wise import cost as cuda_cost
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.errors import MaskError, UnsupportedError
from tir_kernels.masks.block_counts import FINEST, FineMask
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.token_strides import find_token_stride


class MaskLike(Protocol):
    """What choosing needs of a mask: its storage, its parts within and beyond a distance |i - j|, a repr for messages.

    Equal masks are equal and hash alike.
    """

    def compile(self, q_len: int, kv_len: int, block: tuple[int, int], token_stride: int = 1) -> BlockSparseMask:
        """The storage for these lengths, in blocks of `block` = (height, width); MaskError where it does not fit."""
        ...

    def split(self, distance: int) -> "tuple[MaskLike, MaskLike]":
        """Two masks: what this one keeps with |i - j| <= distance, and what it keeps beyond."""
        ...


@dataclass(frozen=True)
class Choice:
    """A kernel template, its configuration, the problem and the mask compiled for it, and why.

    `predicted_us` is the model's time in microseconds, on LLVM for one processor; it serves to rank candidates.
    `first`, if any, computes another part of the mask before, and this kernel continues from its result.
    `predicted_us` and `measured_us` are then times of both; `measured_us` comes from a tuning log.
    """

    template: ModuleType
    config: object
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
        return listed / (self.problem.q_len * self.problem.kv_len)


@dataclass(frozen=True)
class Cost:
    """Nanoseconds for one multiply-add of a score or output element, one listed block, and one query row."""

    element: float
    block: float
    row: float


# Fitted on AMD Zen 5 (AVX-512).
COSTS = {
    ("llvm", "block-wise"): Cost(element=0.009, block=300.0, row=20.0),
    ("llvm", "row-wise"): Cost(element=0.08, block=20.0, row=100.0),
}


def choose(problem: AttentionProblem, mask: MaskLike | None, target, kernel: str | None = None) -> Choice:
    """The template and configuration with the least predicted time.

    Parameters
    ----------
    mask
        None keeps everything.
    kernel
        Only consider the template of this name.

    Raises UnsupportedError, with each template's reason, where none can compute the problem; MaskError for a mask that
    does not fit the problem or keeps nothing.
    """
    choices, refusals = [], []
    for template in templates_for(target, kernel):
        reason = template.unsupported(problem, target)
        if reason is not None:
            refusals.append(f"{template.NAME}: {reason}")
        elif template is block_wise_cuda:
            choices.append(best_block_wise(problem, mask, target))
        else:
            config = template.configs(problem, target)[0]
            compiled = compile_mask(mask, problem, (config.block_m, config.block_n))
            us = predict_us(template, problem, compiled, target)
            choices.append(Choice(template, config, problem, compiled, us, ""))
    if not choices:
        raise UnsupportedError(f"no attention kernel for this problem ({'; '.join(refusals)}): {problem}")
    best, *others = sorted(choices, key=lambda choice: choice.predicted_us)
    best_us = best.predicted_us
    reason = f"predicted {best_us:.0f} µs"
    if best.template is block_wise_cuda and mask is not None:
        strided = choose_token_stride(problem, mask, best.mask, target)
        if strided is not None and strided.predicted_us < best_us:
            return replace(strided, reason=f"predicted {strided.predicted_us:.0f} µs against {best_us:.0f} µs in order")
    if others:
        reason += f" against {others[0].predicted_us:.0f} µs {others[0].template.NAME}"
    elif kernel is not None:
        reason += ", asked for by name"
    else:
        reason += f", the only {target.kind.name} kernel" + (f" ({'; '.join(refusals)})" if refusals else "")
    return replace(best, reason=reason)


def choose_token_stride(problem: AttentionProblem, mask: MaskLike, compiled: BlockSparseMask, target) -> Choice | None:
    """The best block-wise CUDA kernel for blocks of tokens at a stride, or None if the mask does not suggest one.

    `compiled` is the mask in the usual order.  The part within a window, if any, is computed before, in the usual
    order.
    """
    found = find_token_stride(compiled)
    if found is None:
        return None
    if found.near == 0:
        return best_block_wise(problem, mask, target, found.stride)
    near, far = parts_at(problem, mask, found.near)
    first, rest = best_block_wise(*near, target), best_block_wise(*far, target, found.stride)
    return replace(rest, predicted_us=first.predicted_us + rest.predicted_us, first=first)


def parts_at(problem: AttentionProblem, mask: MaskLike, distance: int) -> list[tuple[AttentionProblem, MaskLike]]:
    """The problem and mask within a distance |i - j|, and those beyond it, which continue from the first result.

    Only the second problem has the sink.
    """
    near, far = mask.split(distance)
    return [(replace(problem, gives_lse=True, sink_dtype=None), near), (replace(problem, continues=True), far)]


def best_block_wise(problem: AttentionProblem, mask: MaskLike | None, target, token_stride: int = 1) -> Choice:
    """The configuration of the block-wise CUDA kernel with the least predicted time, for blocks of every n-th token.

    The mask is compiled twice: in the finest blocks, which give the counts for every configuration, and in the blocks
    of the chosen configuration.
    """
    fine = FineMask(compile_mask(mask, problem, FINEST, token_stride))
    configs = cuda_cost.shortlist(block_wise_cuda.configs(problem, target))
    times = [cuda_cost.predict_us(problem, config, fine, str(target.attrs["arch"])) for config in configs]
    us, config = min(zip(times, configs), key=lambda pair: pair[0])
    config = replace(config, token_stride=token_stride)
    compiled = compile_mask(mask, problem, (config.block_m, config.block_n), token_stride)
    return Choice(block_wise_cuda, config, problem, compiled, us, "")


def compile_mask(
    mask: MaskLike | None, problem: AttentionProblem, block: tuple[int, int], token_stride: int = 1
) -> BlockSparseMask:
    """The mask's storage for a problem; MaskError where it does not fit its batch and heads or keeps nothing."""
    if mask is None:
        return BlockSparseMask.keep_all(problem.q_len, problem.kv_len, block)
    compiled = mask.compile(problem.q_len, problem.kv_len, block, token_stride)
    compiled.head_map(problem.batch, problem.q_heads)
    if compiled.is_empty:
        raise MaskError(f"the mask {mask!r} keeps nothing at ({problem.q_len}, {problem.kv_len})")
    return compiled


def predict_us(template: ModuleType, problem: AttentionProblem, mask: BlockSparseMask, target) -> float:
    """Predicted microseconds of another template's default configuration; on LLVM, on one processor."""
    if template is row_wise_cuda:
        return cuda_cost.predict_row_wise_us(problem, mask, str(target.attrs["arch"]))
    cost = COSTS[template.TARGET_KIND, template.NAME]
    heads = problem.batch * problem.q_heads
    blocks = len(mask.load_col_idx) / mask.n_patterns
    if template.NAME == "row-wise":
        elements = mask.density * problem.q_len * problem.kv_len
        blocks *= min(mask.block_m, problem.q_len)  # each row walks its block row's list
    else:
        elements = blocks * mask.block_m * mask.block_n
    dims = problem.head_dim + problem.v_head_dim
    return heads * (elements * dims * cost.element + blocks * cost.block + problem.q_len * cost.row) / 1000
