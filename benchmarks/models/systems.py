"""What runs a whole model: this project's engine, and PyTorch eager or compiled with CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch

from benchmarks.models.cases import ModelCase
from benchmarks.models.families import make_inputs, make_model
from benchmarks.peers.patterns import Pattern
from relax_passes.fusion.lower_segments import DEFAULT, DEFERRED
from tir_kernels.fusion.gemm import gemm as gemm_cuda

OURS = "stof"
DEFAULTS = "stof-defaults"
ATTENTION_ONLY = "stof-attention-only"
FUSION_ONLY = "stof-fusion-only"
NORM_KERNELS = "stof-norm-kernels"
VARIANTS = (OURS, DEFAULTS, ATTENTION_ONLY, FUSION_ONLY, NORM_KERNELS)
ALL = (*VARIANTS, "eager", "compile-sdpa", "compile-flex")


@dataclass(frozen=True)
class System:
    """`call` takes one input and returns the hidden state, valid until the next call; `variant` says what runs."""

    call: Callable[[torch.Tensor], torch.Tensor]
    variant: str


def prepare(name: str, case: ModelCase, pattern: Pattern, device: str, small: bool = False) -> System:
    """Make a system ready; compiled ones compile at their first calls (on the CPU, for dry runs, they stay eager)."""
    if name in VARIANTS:
        return _stof(name, case, pattern, device, small)
    from benchmarks.models.peers import torch_model

    model = torch_model(case, pattern, device, name == "compile-flex", small)
    if name == "eager" or device == "cpu":
        return System(model, f"torch {torch.__version__}")
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def call(x):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    return System(call, f"torch {torch.__version__} reduce-overhead")


def _stof(name: str, case: ModelCase, pattern: Pattern, device: str, small: bool) -> System:
    """The engine as `build` makes it where there are tuning logs, or one of

    - stof-defaults: without them, by the analytical models;
    - stof-attention-only: with a segment for each operator, no fusion but that of projections;
    - stof-fusion-only: the mask as an input of the model, added to the scores: no block is skipped;
    - stof-norm-kernels: with the logs, but a kernel for each norm: none is deferred to the products around it.
    """
    import stof_tvm

    inputs, mask = make_inputs(case, 1, "cpu"), pattern.stof_mask()
    if name == FUSION_ONLY:
        inputs, mask = [*inputs, added_mask(case, pattern)], None
    target = "llvm" if device == "cpu" else None

    def build(scheme=None):
        model = make_model(case, small=small)
        logs = None if name in (OURS, NORM_KERNELS) else False
        # The benchmark checks results itself; PyTorch on the CPU would take minutes for the largest batches.
        options = {"mask": mask, "strict": True, "fusion_scheme": scheme, "tuning_logs": logs, "verify": False}
        with patch.object(gemm_cuda, "DEFERS_NORMS", name != NORM_KERNELS):
            return stof_tvm.build(model, target, tuple(inputs), **options)

    engine = call = build()
    if name == ATTENTION_ONLY:
        operators = sum(len(segment.operators) for segment in engine.report().segments)
        engine = call = build("".join("01"[number % 2] for number in range(operators)))
    if name == FUSION_ONLY:
        added = inputs[1].to(device)
        call = lambda x: engine(x, added)
    segments, report = engine.report().segments, engine.report()
    kernels = sum(segment.kernel not in (DEFAULT, DEFERRED) for segment in segments)
    sites = {f"{site.kernel} {site.config}" for site in report.rewritten}
    logs = "tuned" if report.tuning else "not tuned"
    return System(call, f"{', '.join(sorted(sites))}; {len(segments)} segments, {kernels} on templates; {logs}")


def added_mask(case: ModelCase, pattern: Pattern) -> torch.Tensor:
    """(1, 1, length, length) in the case's dtype: 0 where attention is kept, else its least number."""
    from benchmarks.models.peers import whole_mask

    dtype = getattr(torch, case.dtype)
    keep = whole_mask(case, pattern).cpu()
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)[None, None]
