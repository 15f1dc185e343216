"""What runs a whole model: this project's engine, and PyTorch eager or compiled with CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.models.cases import ModelCase
from benchmarks.models.families import make_inputs, make_model
from benchmarks.peers.patterns import Pattern

OURS = "stof"
ATTENTION_ONLY = "stof-attention-only"
ALL = (OURS, ATTENTION_ONLY, "eager", "compile-sdpa", "compile-flex")


@dataclass(frozen=True)
class System:
    """`call` takes one input and returns the hidden state, valid until the next call; `variant` says what runs."""

    call: Callable[[torch.Tensor], torch.Tensor]
    variant: str


def prepare(name: str, case: ModelCase, pattern: Pattern, device: str, small: bool = False) -> System:
    """Make a system ready; compiled ones compile at their first calls (on the CPU, for dry runs, they stay eager)."""
    if name in (OURS, ATTENTION_ONLY):
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
    """The engine as `build` makes it, or with a segment for each operator: no fusion but that of projections."""
    import stof_tvm

    (example,) = make_inputs(case, 1, "cpu")
    target = "llvm" if device == "cpu" else None

    def build(scheme=None):
        model = make_model(case, small=small)
        return stof_tvm.build(model, target, (example,), mask=pattern.library_mask(), strict=True, fusion_scheme=scheme)

    engine = build()
    if name == ATTENTION_ONLY:
        operators = sum(len(segment["operators"]) for segment in engine.report().segments)
        engine = build("".join("01"[number % 2] for number in range(operators)))
    segments = engine.report().segments
    kernels = sum(segment["kernel"] != "default" for segment in segments)
    sites = {f"{site['kernel']} {site['config']}" for site in engine.report().sites}
    return System(engine, f"{', '.join(sorted(sites))}; {len(segments)} segments, {kernels} on templates")
