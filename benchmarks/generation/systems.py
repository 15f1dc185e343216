"""What generates: this project's engines, and transformers' loop with a static cache and a compiled model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.generation.cases import FIRST, GenerateCase
from benchmarks.generation.models import make_model
from benchmarks.lengths.systems import QUICK

OURS, BACKEND = "stof", "stof-compile"
PEERS = ("compile-sdpa", "compile-flex")
ALL = (OURS, BACKEND, *PEERS)


@dataclass(frozen=True)
class System:
    """`call(ids, new, streamer)` returns prompts and `new` tokens, int64 (batch, tokens); `variant` says what runs.

    A streamer is one of transformers: its `put` takes each step's tokens when they are on the host.
    """

    call: Callable[[torch.Tensor, int, object], torch.Tensor]
    variant: str


def prepare(name: str, case: GenerateCase, device: str, small: bool) -> System:
    """A system; on the CPU, for dry runs, what PyTorch should compile stays eager.

    - stof: `stof_tvm.generation.engines`, whose window is a mask;
    - stof-compile: transformers' `generate` with `torch.compile(model.forward, backend="stof")`;
    - compile-…: transformers' `generate` as it compiles steps by itself, with reduce-overhead; for the first token all
      of the model is compiled.
    """
    if name == OURS:
        return _engines(case, device, small)
    if name == "compile-flex" and not hasattr(BlockMask, "contiguous"):
        BlockMask.contiguous = lambda self: self  # transformers' loop calls it on every mask that it made
    model = make_model(case, "flex_attention" if name == "compile-flex" else "sdpa", small).to(device)
    options = {"cache_implementation": "static", "do_sample": False}
    variant = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if name == BACKEND:
        from stof_tvm.dynamo.backend import stof  # by its name only where the package is installed

        compiled = {"target": QUICK} if device == "cpu" else {}
        model.forward = torch.compile(model.forward, backend=stof, options=compiled)
        options["disable_compile"], variant = True, f"{variant}, torch.compile(model.forward, backend='stof')"
    elif device == "cpu":
        options["disable_compile"] = True
    elif case.kind == FIRST:
        model.forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
        options["disable_compile"], variant = True, f"{variant}, forward with reduce-overhead"
    else:
        # As transformers chooses, dynamic=None: the length of a sliding cache is a number that changes in each step.
        options["compile_config"] = transformers.CompileConfig(mode="reduce-overhead")
        variant = f"{variant}, steps with reduce-overhead"

    def call(ids, new, streamer=None):
        return model.generate(ids, max_new_tokens=new, streamer=streamer, **options)

    is_dry = device == "cpu" and name in PEERS
    return System(torch.compiler.set_stance("force_eager")(call) if is_dry else call, variant)


def _engines(case: GenerateCase, device: str, small: bool) -> System:
    """Engines of the case's prompt and of tokens; not verified, because errors are measured on the GPU anyway."""
    from stof_tvm import generation, masks

    # The window is a mask: engines take models whose caches hold every token.
    mask = masks.sliding_window(case.window - 1, causal=True) if case.window else None
    generator = generation.engines(
        make_model(case, small=small, windows=False).to(device),
        max_length=case.cache,
        batch=case.batch,
        prompt=None if case.kind == FIRST else [case.prompt],
        target=QUICK if device == "cpu" else None,
        mask=mask,
        verify=False,
    )

    def call(ids, new, streamer=None):
        return generator.generate(ids, max_new_tokens=new, do_sample=False, streamer=streamer)

    return System(call, f"engines of a prompt and of tokens, {'causal' if mask is None else mask}")
