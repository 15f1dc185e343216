"""The way of a model through the compiler: the flat list of phases that `stof_tvm.build` runs.

A phase is selected by its name: `run_pipeline(…, after="fold_masks", until="lower_segments")` runs some of them.  If
STOF_DUMP_DIR is set, the module after each phase is written to that folder as `<nn>_<phase>.py`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm
from tvm import relax

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.caches.rows_of_caches import RowsOfCaches
from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.composite import AttentionCall
from relax_passes.attention.fold_conditions import FoldConditions
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.fold_scalars import FoldScalars
from relax_passes.attention.found_blocks.block_maps import SiteRule
from relax_passes.attention.layouts.unfold_heads import UnfoldHeads
from relax_passes.attention.layouts.upright_scores import UprightScores
from relax_passes.attention.replaceable_masks import ReplaceableMasks
from relax_passes.attention.rewrite_masked_attention import RewriteMaskedAttention
from relax_passes.extensions import NO_EXTENSIONS, Extensions
from relax_passes.fusion.canonicalize_operators import CanonicalizeOperators
from relax_passes.fusion.convolutions.convolutions_to_products import ConvolutionsToProducts
from relax_passes.fusion.fold_closed_expressions import FoldClosedExpressions
from relax_passes.fusion.gathered_rows import GatheredRows
from relax_passes.fusion.late_broadcasts import LateBroadcasts
from relax_passes.fusion.lower_copies import LowerCopies
from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.merging.merge_gates import MergeGates
from relax_passes.fusion.merging.merge_projections import MergeProjections
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.tuned_scheme import TunedScheme
from relax_passes.fusion.sorting.cumulative_counts import CumulativeCounts
from relax_passes.fusion.sorting.places_inside import PlacesInside
from relax_passes.fusion.sorting.sorts_to_kernels import SortsToKernels
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.fusion.vector_products import VectorProducts
from relax_passes.parallel.align_constants import AlignConstants
from relax_passes.parallel.placement import Ranks
from relax_passes.parallel.shard_tensors import ShardTensors
from relax_passes.parallel.share_attentions import ShareAttentions
from relax_passes.read_rows.attentions import AttentionRows
from relax_passes.read_rows.compute_reached_rows import ComputeReachedRows
from relax_passes.read_rows.compute_read_rows import ComputeReadRows
from relax_passes.read_rows.windows import AttentionWindows
from relax_passes.runtime.all_reduce_in_place import AllReduceInPlace
from relax_passes.runtime.memory_parameters import MemoryParameters
from relax_passes.runtime.rewrite_reshapes import RewriteReshapes
from relax_passes.runtime.store_to_peer import StoreToPeer
from relax_passes.runtime.update_states import UpdateStates
from relax_passes.schedule.cpu import ScheduleForCPU, cpu_passes
from relax_passes.schedule.cpu_rules.plain import scheduled_only
from relax_passes.schedule.cuda import ScheduleForCUDA, cuda_passes
from relax_passes.token_order.order_tokens import OrderTokens
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.attention.select import MaskLike
from tir_kernels.errors import InputError
from tir_kernels.fusion.registry import templates_for


class SiteMask(Protocol):
    """The interface of an object that gives the mask of each attention."""

    def __call__(self, site: AttentionSite) -> MaskLike | None:
        """The whole mask of an attention site (causal, constant and the user's own), or None."""

    def given_for(self, path: str, sizes: tuple[int, int, int, int], first_row: int | None = None) -> MaskLike | None:
        """The mask that the user gave for the attention at `path` with `sizes` (B, H, Sq, Skv), or None.

        With `first_row` it is the Sq rows from there on of the mask at (Skv, Skv).
        """

    def order_for(self, path: str, sizes: tuple[int, int, int, int]) -> np.ndarray | None:
        """The order of tokens, int64 (tokens,), that the user's mask for the attention at `path` wants, or None."""

    def reach_for(self, path: str, sizes: tuple[int, int, int, int]) -> tuple[float, float] | None:
        """(how far before, how far behind) its query that mask keeps a key; infinity for all, also without a mask.

        None where it does not go by the distance of key and query alone, at all lengths alike.
        """

    def is_given(self, path: str) -> bool:
        """Whether the user gave a mask or a rule for the attention at a path."""

    def rule_for(self, path: str) -> SiteRule | None:
        """The rule that finds the blocks which the attention at `path` keeps of its mask, or None."""


@dataclass(frozen=True)
class Job:
    """The arguments from which the passes of one run are built.

    `scheme` cuts the operators into segments, and `chooser` picks a template for each segment.  The other fields are
    arguments of `run_pipeline`.
    """

    target: tvm.target.Target
    site_mask: SiteMask
    chooser: TemplateChooser
    scheme: FusionScheme | InitialScheme | TunedScheme
    tuned: TunedChoices | None
    extensions: Extensions
    float32: str
    replaceable: ReplaceableMasks | None = None
    ranks: Ranks | None = None
    shared: Callable[[AttentionCall], str] | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the target is a GPU."""
        return self.target.kind.name == "cuda"

    def is_scheme_for(self, graph: OperatorGraph, other: OperatorGraph) -> bool:
        """Whether a scheme that was given, or that a tuning log has, is for a graph rather than for another one."""
        if isinstance(self.scheme, FusionScheme):
            return len(self.scheme) == len(graph.operators) != len(other.operators)
        return isinstance(self.scheme, TunedScheme) and self.scheme.is_faster_with(graph, other)


# Every phase in order, from imported Relax to a module ready for code generation: its name, and its passes.
PHASES: dict[str, Callable[[Job], list]] = {
    # Every spelling of attention becomes one composite.
    "canonicalize_attention": lambda job: [
        FoldScalars(),
        FoldConditions(),
        UnfoldHeads(),
        UprightScores(),
        CanonicalizeAttention(),
    ],
    # Attentions over caches are told their rows of a given mask; masks that depend on no input become constants.
    "fold_masks": lambda job: [
        RowsOfCaches(job.site_mask.given_for, job.replaceable is not None),
        FoldMasks(job.site_mask.given_for, job.replaceable is not None, job.site_mask.rule_for),
    ],
    # Where some rows of a layer are read, the others are not computed, nor those that no window leads to.
    "read_rows": lambda job: (
        [] if job.shared is not None else [ComputeReachedRows(_windows(job)), ComputeReadRows(_attention_rows(job))]
    ),
    # Heads and products are divided among ranks: the module becomes the program of one of them.
    "shard_tensors": lambda job: [] if job.ranks is None else [ShardTensors(job.ranks), AlignConstants()],
    # Tokens stand in the order that their masks want, moved once before the attentions and once behind them.
    "order_tokens": lambda job: (
        [OrderTokens(job.site_mask.order_for, job.site_mask.is_given)]
        if job.replaceable is None and job.shared is None
        else []
    ),
    # Projections that meet in one attention become one packed projection.
    "merge_projections": lambda job: [MergeProjections()],
    # Masked attention becomes sparse kernels, or exchanges keys with other ranks; one that stays dense is inlined.
    "rewrite_masked_attention": lambda job: [
        *([] if job.shared is None else [ShareAttentions(job.shared)]),
        RewriteMaskedAttention(
            job.target,
            job.site_mask,
            job.tuned,
            job.float32,
            job.replaceable,
            job.site_mask.rule_for,
            job.site_mask.is_given,
        ),
        relax.transform.DeadCodeElimination(),
        relax.transform.InlinePrivateFunctions(),
    ],
    # The operators around attention have one spelling each, and a user's rules rewrite them; on a GPU, a gate and its
    # values become one product.
    "canonicalize_operators": lambda job: [
        relax.transform.ConvertToDataflow(),
        ConvolutionsToProducts(job.is_cuda),
        LateBroadcasts(),
        FoldClosedExpressions(),
        CanonicalizeOperators(),
        CumulativeCounts(),
        *([VectorProducts(), SortsToKernels(job.target)] if job.is_cuda else []),
        *job.extensions.rules,
        # In this order: a place that is known to lie inside is clipped, and products take missing rows for NaN.
        *([GatheredRows(job.chooser), PlacesInside()] if job.is_cuda else []),
        *([MergeGates(job.chooser, job.is_scheme_for)] if job.is_cuda else []),
    ],
    # The fusion scheme cuts these operators into segments; each becomes a function.
    "partition_segments": lambda job: [
        PartitionSegments(job.scheme, lambda function: not isinstance(job.chooser.choose(function), str))
    ],
    # Each segment becomes a template's kernel, or stays a function of operators; on a GPU, views become copies.
    "lower_segments": lambda job: [
        LowerSegments(job.chooser),
        *([LowerCopies(job.target), relax.transform.DeadCodeElimination()] if job.is_cuda else []),
    ],
    # Operators that no template computes become scheduled PrimFuncs, fused within their segments.
    "schedule_functions": lambda job: (cuda_passes if job.is_cuda else cpu_passes)(job.target, job.tuned),
    # Reshapes become views.
    "rewrite_reshapes": lambda job: [
        RewriteReshapes(),
        relax.transform.DeadCodeElimination(),  # drops the PrimFuncs of those reshapes
    ],
    # Dataflow becomes calls with explicit outputs; states are written in place.
    "lower_dataflow": lambda job: [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        UpdateStates((ScheduleForCUDA if job.is_cuda else ScheduleForCPU)(job.target)),
        relax.transform.CallTIRRewrite(),
        *([] if job.ranks is None else [AllReduceInPlace(job.ranks.all_reduce), StoreToPeer(job.ranks)]),
    ],
    # Memory is planned; on a GPU the engine provides it.
    "plan_memory": lambda job: [
        relax.transform.StaticPlanBlockMemory(),
        *([MemoryParameters()] if job.is_cuda else []),
    ],
    # The rest becomes calls that the Relax virtual machine runs.
    "lower_runtime": lambda job: [
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ],
}


def _attention_rows(job: Job) -> AttentionRows | None:
    """What narrows attentions; None where masks that come after the build are for all rows."""
    masks = job.site_mask
    return (
        None
        if job.replaceable is not None
        else AttentionRows(job.target, job.float32, masks, masks.given_for, masks.rule_for, masks.order_for)
    )


def _windows(job: Job) -> AttentionWindows | None:
    """The same for attentions with windows."""
    masks = job.site_mask
    return (
        None
        if job.replaceable is not None
        else AttentionWindows(masks, masks.given_for, masks.rule_for, masks.order_for, masks.reach_for)
    )


def run_pipeline(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    site_mask: SiteMask,
    fusion_scheme: FusionScheme | None = None,
    progress: Callable[[str], None] | None = None,
    tuned: TunedChoices | None = None,
    extensions: Extensions = NO_EXTENSIONS,
    *,
    float32: str = "ieee",
    replaceable: ReplaceableMasks | None = None,
    ranks: Ranks | None = None,
    shared: Callable[[AttentionCall], str] | None = None,
    after: str | None = None,
    until: str | None = None,
) -> tvm.IRModule:
    """Run all `PHASES` on a module, or only those after `after`, up to and including `until`.

    `site_mask` gives `RewriteMaskedAttention` the mask of each site.  `fusion_scheme` cuts the operators into segments;
    without one, the tuning log or the analytical model does.  `progress(name)` is called before each phase.  `tuned`
    replays a tuning log.  `extensions` are a user's own templates and rules.  `float32`, "ieee" or "tf32", says how
    GPUs multiply float32.  With `replaceable`, masks may be replaced after the build, and it gets what makes their
    arrays (`RewriteMaskedAttention`).  With `ranks` it is the program of one rank of several.  `shared` names the
    function that computes each attention of a sequence that ranks share (`ShareAttentions`).

    Raises InputError for a name that no phase has, and if no phase lies between `after` and `until`.
    """
    chooser = TemplateChooser(target, [*extensions.templates_for(target), *templates_for(target)], tuned, float32)
    initial_scheme = InitialScheme(chooser)
    scheme = fusion_scheme or (initial_scheme if tuned is None else TunedScheme(tuned, initial_scheme))
    job = Job(target, site_mask, chooser, scheme, tuned, extensions, float32, replaceable, ranks, shared)
    for number, name in _between(after, until):
        if progress is not None:
            progress(name)
        with target:
            mod = tvm.transform.Sequential(PHASES[name](job), name=name)(mod)
        _dump(mod, f"{number:02d}_{name}.py")
    return mod


def _between(after: str | None, until: str | None) -> list[tuple[int, str]]:
    """(index in `PHASES`, name) of each phase to run."""
    names = list(PHASES)
    for name in (after, until):
        if name is not None and name not in PHASES:
            raise InputError(f"{name!r} is no phase: they are {', '.join(names)}")
    start = 0 if after is None else names.index(after) + 1
    stop = len(names) if until is None else names.index(until) + 1
    if start >= stop:
        raise InputError(f"there is no phase after {after!r}" + ("" if until is None else f" until {until!r}"))
    return list(enumerate(names))[start:stop]


def _dump(mod: tvm.IRModule, file_name: str) -> None:
    if folder := os.environ.get("STOF_DUMP_DIR"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, file_name).write_text(scheduled_only(mod).script())
        except OSError as error:
            raise InputError(f"STOF_DUMP_DIR={folder} is no folder that can be written: {error.strerror}") from error
