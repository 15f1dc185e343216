"""What runs a model at any length: a range engine, engines of one shape, and PyTorch compiled for many shapes."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.lengths.cases import BATCH, LEAST, LengthCase, Sizes
from benchmarks.lengths.models import CAUSAL, make_inputs, make_model

OURS, FIXED = "stof", "stof-fixed"
DYNAMIC, BUCKETS, COMPILED = "compile-dynamic", "compile-buckets", "compile-fixed"
ALL = (OURS, FIXED, DYNAMIC, BUCKETS, COMPILED)
RANGE = (OURS, DYNAMIC, BUCKETS)  # one process runs them at all lengths
AHEAD, LAZY = "ahead", "lazy"
MODES = (AHEAD, LAZY)
QUICK = {"kind": "llvm", "opt-level": 0}  # of dry runs: LLVM's optimizer takes most of a build


@dataclass(frozen=True)
class System:
    """`call` takes a call's inputs and returns the hidden state, valid until the next; `variant` says what runs."""

    call: Callable[..., torch.Tensor]
    variant: str


def prepare(
    name: str,
    case: LengthCase,
    sizes: Sizes,
    mode: str,
    device: str,
    small: bool,
    buckets: tuple[int, ...] | None = None,
) -> tuple[System, dict]:
    """A system, and what the row tells of it; on the CPU, for dry runs, what should compile stays eager.

    The systems in RANGE run any length, the others that of the case.  `mode` is in MODES and says when OURS compiles,
    `buckets` for which lengths it does so ahead; None: as `build` chooses.
    """
    if name == OURS:
        return _stof(case, sizes, device, small, mode, buckets)
    if name == FIXED:
        return _stof(case, sizes, device, small)
    model = make_model(case, small).to(device)
    variant = f"torch {torch.__version__}"
    options = {"dynamic": True} if name == DYNAMIC else {"mode": "reduce-overhead", "dynamic": False}
    if device == "cpu":
        call = torch.compiler.set_stance("force_eager")(model.forward)
    elif name == DYNAMIC:
        call = torch.compile(model, **options)
    else:
        call = _with_steps(torch.compile(model, **options))
    if name == BUCKETS:
        call = functools.partial(_in_bucket, call, case.model in CAUSAL, _least_bucket(sizes))
        return System(call, f"{variant}, reduce-overhead at powers of two from {_least_bucket(sizes)} on"), {}
    return System(call, f"{variant}, " + ("dynamic=True" if name == DYNAMIC else "reduce-overhead")), {}


def best_mode() -> str:
    """AHEAD where `build` compiles a range by itself, else LAZY; tried with a model of one addition."""
    import stof_tvm
    from stof_tvm.errors import UnsupportedError

    class AddOne(torch.nn.Module):
        def forward(self, x):
            return x + 1

    length = torch.export.Dim("length", min=2, max=8)
    try:
        stof_tvm.build(AddOne(), "llvm", (torch.zeros(1, 4),), dynamic_shapes={"x": {1: length}}, verify=False)
    except UnsupportedError:
        return LAZY
    return AHEAD


def bucket_of(length: int, least: int) -> int:
    """The least power of two that holds a length, and is not below `least`, a power of two."""
    return max(least, 1 << (length - 1).bit_length())


def _least_bucket(sizes: Sizes) -> int:
    return bucket_of(sizes.shortest, 1)


def _with_steps(compiled):
    """A compiled model whose outputs may be overwritten by the next call, as CUDA graphs need it."""

    def call(*inputs):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return call


def _in_bucket(call, is_causal: bool, least: int, ids: torch.Tensor, mask: torch.Tensor | None = None):
    """The call of a padded input: what was not there is masked, except where no token sees what comes after it."""
    length = ids.shape[1]
    pad = 0, bucket_of(length, least) - length
    if mask is None and not is_causal:
        mask = torch.ones_like(ids)
    inputs = (F.pad(ids, pad),) if mask is None else (F.pad(ids, pad), F.pad(mask, pad))
    return call(*inputs)[:, :length]


def _stof(
    case: LengthCase,
    sizes: Sizes,
    device: str,
    small: bool,
    mode: str | None = None,
    buckets: tuple[int, ...] | None = None,
) -> tuple[System, dict]:
    """The engine as `build` makes it, of a range of lengths in a mode, or of the case's shape where that is None.

    It is not verified, because that runs the model where it is, on the CPU: errors are measured on the GPU anyway.
    """
    import stof_tvm

    example = make_inputs(case, 1, "cpu", sizes)[0]
    options: dict = {} if mode is None else {"dynamic_shapes": dynamic_shapes(case, sizes), "lazy": mode == LAZY}
    variant = "one shape" if mode is None else f"range, {mode}"
    if mode is not None and case.kind == BATCH:
        options, variant = {"without_padding": True}, "without padding"
    elif buckets is not None:
        options["buckets"], variant = buckets, f"{variant}, buckets {', '.join(map(str, buckets))}"
    start = time.perf_counter()
    target = QUICK if device == "cpu" else None
    engine = stof_tvm.build(make_model(case, small), target, example, verify=False, **options)
    facts = {"build_s": round(time.perf_counter() - start, 1)}
    return System(engine, variant), facts


def dynamic_shapes(case: LengthCase, sizes: Sizes) -> dict:
    """The range of a case's inputs, as `build` and torch.export take it: the length, at the case's batch."""
    is_batch = case.kind == BATCH
    low, high = (LEAST, sizes.longest_in_batch) if is_batch else (sizes.shortest, sizes.longest)
    length = torch.export.Dim("length", min=low, max=high)
    return {"ids": {1: length}} | ({"attention_mask": {1: length}} if is_batch else {})
