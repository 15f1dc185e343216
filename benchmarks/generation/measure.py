"""One system on one case: made ready at once, checked and timed when it is its turn (models/worker.py)."""

import gc
import time
from collections.abc import Callable, Iterator

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.generation import reference
from benchmarks.generation.cases import FIRST, GenerateCase
from benchmarks.generation.models import make_model, make_prompts
from benchmarks.generation.systems import System, prepare

CHECKED = 2  # sequences of a batch: the first and the last


class Stamps(BaseStreamer):
    """The times, in seconds, when tokens were on the host; prompts that a loop streams before are none."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time, where `value` is one token for each sequence, (batch,)."""
        if value.dim() == 1:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing: every token has its time."""


def get_ready(
    cases: tuple[GenerateCase], name: str, device: str, small: bool, runs: int
) -> tuple[dict, Callable[[], Iterator[dict]]]:
    """Prepare a system and generate once, which compiles; nothing of the row is known before it is measured."""
    (case,) = cases
    system, ids = prepare(name, case, device, small), make_prompts(case, device)
    system.call(ids, case.new, None)
    systems = [system]
    del system
    return {}, lambda: _measured(systems, case, ids, small, runs)


def _measured(systems: list[System], case: GenerateCase, ids: torch.Tensor, small: bool, runs: int) -> Iterator[dict]:
    """The row of the one system in a list.

    It is taken out, and its memory given back, before the models are made that its tokens are checked by: its caches
    may leave no room for them.
    """
    system = systems.pop()
    tokens, variant = system.call(ids, case.new, None), system.variant
    samples = sorted(_sample_us(system, case, ids) for _ in range(runs))
    del system
    gc.collect()
    if ids.is_cuda:
        torch.cuda.empty_cache()
    error, half_error = errors(tokens, case, small)
    us = samples[len(samples) // 2]
    fields = {"median_us": us, "wall_us": us, "samples_us": samples, "error": error, "half_error": half_error}
    if case.kind != FIRST:
        fields["tokens_per_s"] = float(f"{case.batch * 1e6 / us:.5g}")
    yield {"case": case, "variant": variant, **fields}


def _sample_us(system: System, case: GenerateCase, ids: torch.Tensor) -> float:
    """Microseconds until the first token was on the host, or of a step after it: a mean over all of them."""
    stamps = Stamps()
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    system.call(ids, case.new, stamps)
    if len(stamps.times) != case.new:
        raise RuntimeError(f"{len(stamps.times)} steps were streamed in place of {case.new}")
    first, last = stamps.times[0], stamps.times[-1]
    seconds = first - start if case.kind == FIRST else (last - first) / (case.new - 1)
    return float(f"{seconds * 1e6:.5g}")


def errors(tokens: torch.Tensor, case: GenerateCase, small: bool) -> tuple[float, float]:
    """What logits are wrong by, at least, if these tokens were chosen by them; the error of PyTorch in half precision.

    Float32's logits at each chosen token are compared with the largest there.  Logits that are wrong by e choose a
    token that is at most 2 e below the largest.  Prompts are those of `make_prompts`, or it is an error without bound.
    """
    some = tokens[[0, -1] if len(tokens) >= CHECKED else [0]]
    prompts = make_prompts(case, str(tokens.device))[[0, -1] if len(tokens) >= CHECKED else [0]]
    if some.shape[1] != case.cache or not torch.equal(some[:, : case.prompt], prompts):
        return float("nan"), torch.finfo(torch.float32).eps
    reference.register()
    model = make_model(case, reference.NAME, small).to(tokens.device)
    half = _logits(model, some, case.new).float()
    exact = _logits(model.float(), some, case.new)
    chosen = exact.gather(-1, some[:, case.prompt :, None])[..., 0]
    error = float((exact.amax(-1) - chosen).max()) / 2
    return error, max(float((half - exact).abs().max()), torch.finfo(torch.float32).eps)


def _logits(model, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Logits (batch, count, vocabulary) of the last `count` tokens, each by those before it."""
    return torch.cat([model(x[:, :-1], logits_to_keep=count, use_cache=False).logits for x in tokens.split(1)])
