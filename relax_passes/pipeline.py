"""The way of a model through the compiler: the flat list of phases that `stof_tvm.build` runs.

With STOF_DUMP_DIR set, the module after each phase is written there as `<nn>_<phase>.py`.
"""

import os
from pathlib import Path

import tvm
from tvm import relax

from relax_passes.canonicalize_attention import CanonicalizeAttention
from relax_passes.fold_masks import FoldMasks
from relax_passes.rewrite_masked_attention import RewriteMaskedAttention
from relax_passes.schedule_cpu import cpu_passes
from relax_passes.schedule_cuda import cuda_passes


def phases(target: tvm.target.Target, site_mask) -> list[tuple[str, list]]:
    """(name, passes) of every phase, in order, from imported Relax to a module ready for code generation.

    `site_mask` is what `RewriteMaskedAttention` asks for the mask of each site.
    """
    is_cuda = target.kind.name == "cuda"
    return [
        # Phase 1. Every spelling of attention becomes one composite.
        ("canonicalize_attention", [CanonicalizeAttention()]),
        # Phase 2. Masks that depend on no input become constants.
        ("fold_masks", [FoldMasks()]),
        # Phase 3. Masked attention becomes sparse kernels; what stays dense is inlined.
        (
            "rewrite_masked_attention",
            [
                RewriteMaskedAttention(target, site_mask),
                relax.transform.DeadCodeElimination(),
                relax.transform.InlinePrivateFunctions(),
            ],
        ),
        # Phase 4. Every other operator becomes a scheduled, fused PrimFunc.
        ("lower_operators", cuda_passes(target) if is_cuda else cpu_passes(target)),
        # Phase 5. Dataflow becomes calls with explicit outputs.
        (
            "lower_dataflow",
            [
                relax.transform.RewriteDataflowReshape(),
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
            ],
        ),
        # Phase 6. Memory is planned, and the rest is what the virtual machine runs.
        (
            "plan_memory",
            [
                relax.transform.StaticPlanBlockMemory(),
                *([relax.transform.RewriteCUDAGraph()] if is_cuda else []),
                relax.transform.LowerAllocTensor(),
                relax.transform.KillAfterLastUse(),
                relax.transform.LowerRuntimeBuiltin(),
                relax.transform.ComputePrimValue(),
                relax.transform.VMShapeLower(),
                relax.transform.AttachGlobalSymbol(),
            ],
        ),
    ]


def run_pipeline(mod: tvm.IRModule, target: tvm.target.Target, site_mask, progress=None) -> tvm.IRModule:
    """Run every phase; `progress(name)` is called before each."""
    for number, (name, passes) in enumerate(phases(target, site_mask)):
        if progress is not None:
            progress(name)
        with target:
            mod = tvm.transform.Sequential(passes, name=name)(mod)
        _dump(mod, f"{number:02d}_{name}.py")
    return mod


def _dump(mod: tvm.IRModule, file_name: str) -> None:
    if folder := os.environ.get("STOF_DUMP_DIR"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, file_name).write_text(mod.script())
