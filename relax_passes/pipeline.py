"""The way of a model through the compiler: the flat list of phases that `stof_tvm.build` runs.

With STOF_DUMP_DIR set, the module after each phase is written there as `<nn>_<phase>.py`.
"""

import os
from pathlib import Path

import tvm
from tvm import relax

from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.rewrite_masked_attention import RewriteMaskedAttention
from relax_passes.attention.upright_scores import UprightScores
from relax_passes.extensions import NO_EXTENSIONS, Extensions
from relax_passes.fusion.canonicalize_operators import CanonicalizeOperators
from relax_passes.fusion.fold_closed_expressions import FoldClosedExpressions
from relax_passes.fusion.lower_fusion_groups import LowerFusionGroups
from relax_passes.fusion.merge_projections import MergeProjections
from relax_passes.fusion.partition_fusion_groups import PartitionFusionGroups
from relax_passes.fusion.patches_to_product import PatchesToProduct
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.tuned_scheme import TunedScheme
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.runtime.memory_parameters import MemoryParameters
from relax_passes.runtime.rewrite_reshapes import RewriteReshapes
from relax_passes.schedule.cpu import cpu_passes
from relax_passes.schedule.cpu_rules.plain import scheduled_only
from relax_passes.schedule.cuda import cuda_passes
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.errors import InputError
from tir_kernels.fusion.registry import templates_for


def phases(
    target: tvm.target.Target,
    site_mask,
    fusion_scheme: FusionScheme | None = None,
    tuned: TunedChoices | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> list[tuple[str, list]]:
    """(name, passes) of every phase, in order, from imported Relax to a module ready for code generation.

    `RewriteMaskedAttention` asks `site_mask` for the mask of each site; its `given_for` returns the mask that the user
    gave.  `fusion_scheme` cuts the operators into segments; without one, the tuning log or the analytical model does.
    `tuned` replays a tuning log.  `extensions` are a user's own templates and rules.
    """
    is_cuda = target.kind.name == "cuda"
    chooser = TemplateChooser(target, [*extensions.templates_for(target), *templates_for(target)], tuned)
    initial_scheme = InitialScheme(chooser)
    scheme = fusion_scheme or (initial_scheme if tuned is None else TunedScheme(tuned, initial_scheme))
    return [
        # Phase 1. Every spelling of attention becomes one composite.
        ("canonicalize_attention", [UprightScores(), CanonicalizeAttention()]),
        # Phase 2. Masks that depend on no input become constants.
        ("fold_masks", [FoldMasks(site_mask.given_for)]),
        # Phase 3. Projections that meet in one attention become one, packed.
        ("merge_projections", [MergeProjections()]),
        # Phase 4. Masked attention becomes sparse kernels; what stays dense is inlined.
        (
            "rewrite_masked_attention",
            [
                RewriteMaskedAttention(target, site_mask, tuned),
                relax.transform.DeadCodeElimination(),
                relax.transform.InlinePrivateFunctions(),
            ],
        ),
        # Phase 5. The scheme cuts the rest into segments, each a function.
        (
            "partition_fusion_groups",
            [
                relax.transform.ConvertToDataflow(),
                PatchesToProduct(),
                FoldClosedExpressions(),
                CanonicalizeOperators(),
                *extensions.rules,
                PartitionFusionGroups(scheme),
            ],
        ),
        # Phase 6. Each segment becomes a template's kernel, or scheduled PrimFuncs that are fused within it.
        (
            "lower_fusion_groups",
            [LowerFusionGroups(chooser), *(cuda_passes if is_cuda else cpu_passes)(target, tuned)],
        ),
        # Phase 7. Dataflow becomes calls with explicit outputs.
        (
            "lower_dataflow",
            [
                RewriteReshapes(),
                relax.transform.DeadCodeElimination(),  # the PrimFuncs of those reshapes
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
            ],
        ),
        # Phase 8. Memory is planned (on a GPU the engine provides it), and the rest is what the virtual machine runs.
        (
            "plan_memory",
            [
                relax.transform.StaticPlanBlockMemory(),
                *([MemoryParameters()] if is_cuda else []),
                relax.transform.LowerAllocTensor(),
                relax.transform.KillAfterLastUse(),
                relax.transform.LowerRuntimeBuiltin(),
                relax.transform.ComputePrimValue(),
                relax.transform.VMShapeLower(),
                relax.transform.AttachGlobalSymbol(),
            ],
        ),
    ]


def run_pipeline(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    site_mask,
    fusion_scheme: FusionScheme | None = None,
    progress=None,
    tuned: TunedChoices | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> tvm.IRModule:
    """Run every phase; `progress(name)` is called before each."""
    for number, (name, passes) in enumerate(phases(target, site_mask, fusion_scheme, tuned, extensions)):
        if progress is not None:
            progress(name)
        with target:
            mod = tvm.transform.Sequential(passes, name=name)(mod)
        _dump(mod, f"{number:02d}_{name}.py")
    return mod


def _dump(mod: tvm.IRModule, file_name: str) -> None:
    if folder := os.environ.get("STOF_DUMP_DIR"):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, file_name).write_text(scheduled_only(mod).script())
        except OSError as error:
            raise InputError(f"STOF_DUMP_DIR={folder} is no folder that can be written: {error.strerror}") from error
