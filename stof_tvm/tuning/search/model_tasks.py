"""The parts of a model that are tuned: its attentions, and the graph of operators around them."""

import functools
from dataclasses import dataclass

import tvm

from relax_passes.attention.rewrite_masked_attention import shape_row
from relax_passes.extensions import NO_EXTENSIONS, Extensions
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.pipeline import run_pipeline
from relax_passes.report_rows import site_rows
from relax_passes.tuned_choices import TunedChoices
from stof_tvm.tuning.task import Task, attention_task
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import attention_parts
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.report_rows import RewrittenRow, SiteRow


@dataclass(frozen=True)
class Attention:
    """One attention of the model: how often it runs, and its tasks.  The `parts` together compute what `whole` does."""

    count: int
    whole: Task
    parts: tuple[Task, ...]


@dataclass(frozen=True)
class ModelTasks:
    """The attentions and the graph of operators to tune."""

    attentions: tuple[Attention, ...]
    graph: OperatorGraph


@one_at_a_time
def model_tasks(mod: tvm.IRModule, target, site_mask, extensions: Extensions = NO_EXTENSIONS) -> ModelTasks:
    """The attentions and the graph of operators to tune in an imported model.

    Raises MaskError and NotRewrittenError as `build` does, where a given mask reaches no attention or not all.
    """
    asked = _RecordingChoices()
    given = functools.partial(run_pipeline, target=target, site_mask=site_mask, tuned=asked, extensions=extensions)
    mod = given(mod, until="rewrite_masked_attention")
    sites = site_rows(mod)
    site_mask.check_reached(sites)
    mod = given(mod, after="rewrite_masked_attention", until="canonicalize_operators")  # the search makes the segments
    graph = OperatorGraph(mod["main"])
    attentions = []
    for problem, mask in asked.attentions:
        if problem.gives_lse or problem.continues:  # a part, which is added with its whole
            continue
        parts = attention_parts(problem, mask, target)
        whole = attention_task(problem, mask, target)
        count = sum(_is_of(site, problem, mask) for site in sites)
        attentions.append(Attention(count, whole, tuple(attention_task(*part, target) for part in parts)))
    return ModelTasks(tuple(attentions), graph)


class _RecordingChoices(TunedChoices):
    """Stands in for a tuning log: knows nothing, and keeps which attentions it is asked about."""

    def __init__(self):
        self.attentions = []

    def attention(self, problem: AttentionProblem, mask) -> None:
        self.attentions.append((problem, mask))

    def fusion(self, problem) -> None:
        return None

    def scheme(self, key: str) -> None:
        return None


def _is_of(site: SiteRow, problem: AttentionProblem, mask) -> bool:
    """Whether a row of the report is an attention with this problem and mask."""
    if not isinstance(site, RewrittenRow) or site.mask != ("none" if mask is None else repr(mask)):
        return False
    return site.shape == shape_row(problem) and site.layouts == tuple(str(layout) for layout in problem.layouts)
