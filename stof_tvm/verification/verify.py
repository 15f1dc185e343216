"""`build(verify=True)`: compares the engine's results on the example inputs with PyTorch's."""

import contextlib
import functools
import json
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from stof_tvm.frontend import ImportedModel
from stof_tvm.frontend.export import CACHES, example_inputs
from stof_tvm.frontend.exportable.transformers_cache import without_cache
from stof_tvm.parallel.ranks import Peers
from stof_tvm.report import SKIPPED as NOTHING
from stof_tvm.report import Verification
from stof_tvm.rules.compared import ComparedRules
from stof_tvm.running.machine import why_not_here
from stof_tvm.site_masks import sizes_of
from stof_tvm.verification.backends import by_pytorch, plain_pytorch
from stof_tvm.verification.comparison import Verdict, judge
from stof_tvm.verification.first_difference import first_difference, on
from stof_tvm.verification.masked_nodes import FILLS
from stof_tvm.verification.reference import Reference
from tir_kernels.cuda.device import architecture_number
from tir_kernels.errors import ExportError, UnsupportedError, VerificationError
from tir_kernels.target import local_cuda_arch

PASSED, NOT_VERIFIED = "passed", "not verified"
PYTORCH_FAILS = "PyTorch fails on the example inputs"
WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
TF32_PRECISION = torch.float16  # has as many bits

SKIPPED = Verification(NOTHING, "verify=False")


def verify_engine(
    engine,
    model,
    imported: ImportedModel,
    call: tuple,
    mask_for: Callable,
    compiled: Callable,
    called: "Called | None" = None,
    part: Callable[[list], list] = list,
    peers: Peers | None = None,
    rule_for: Callable = lambda path: None,
):
    """The Verification of comparing an engine with PyTorch on a call's inputs.

    Parameters
    ----------
    engine : Engine
    model : torch.nn.Module or ExportedProgram
    imported : ImportedModel
    call : (tuple, dict)
        Inputs of a call of the model, as `build` was given them.
    mask_for : callable
        Maps a site's path, sizes (B, H, Sq, Skv) and first row to the user's mask there, or None.
    compiled : callable
        Compiles an ImportedModel to an engine in the way this engine was compiled.
    called : Called, optional
        The result of `call_once`.
    part : callable, optional
        What is compared of the leaves of a result.
    peers : Peers, optional
        The ranks that the engine is divided among, each of which compares its results.
    rule_for : callable, optional
        Maps a site's path to the TracedRule that finds what it keeps of the user's mask, or to None.

    Raises VerificationError where a result is further from PyTorch's than the rule of comparison.py allows.
    """
    args, kwargs = call = _call(model, *call)
    if (reason := _why_not(engine, call)) is not None:
        return Verification(NOT_VERIFIED, reason)
    engine.prepare()  # its first call needs this anyway, so it does not count as cost
    results = None if peers is None else peers.step("first call", lambda: results_and_states(engine, args, kwargs))
    started = time.perf_counter() - (0.0 if called is None else called.seconds)
    report = engine.report()
    sites = report.rewritten
    if (rules := ComparedRules(sites, rule_for)).why_not is not None:
        return Verification(NOT_VERIFIED, rules.why_not)
    if rules:
        results = results_and_states(engine, args, kwargs) if results is None else results
        mask_for = rules.masks_found(engine.found_blocks(), mask_for)
        engine._forget_found_blocks()
    precision = TF32_PRECISION if report.float32 == "tf32" else None
    is_masked = any(mask_for(site.site, sizes_of(site), site.first_row) is not None for site in sites)
    reference = Once(lambda: Reference(imported, sites, mask_for, part))
    if is_masked and reference().untied:
        return Verification(NOT_VERIFIED, reference().why_untied)

    has_states = bool(imported.states)  # which a call of the model itself would update

    def compute() -> list:
        is_plain = not is_masked and not has_states and isinstance(model, torch.nn.Module)
        outputs = leaves_of_call(model, args, kwargs) if is_plain else None
        if outputs is None or len(outputs) != len(imported.signature.out_leaves):
            outputs = reference()(args, kwargs)
        return outputs

    is_known = called is not None and not is_masked and len(called.outputs) == len(imported.signature.out_leaves)
    try:
        expected = called.with_states(engine) if called is not None and is_known else compute()
    except Exception as error:  # whatever a model raises
        why = f"{PYTORCH_FAILS}: {_line(error)}"
        warnings.warn(f"the engine was not verified: {why}", stacklevel=2)
        return Verification(NOT_VERIFIED, why)
    actual = part(results_and_states(engine, args, kwargs) if results is None else results)
    dtype = wider_dtype([*pytree.tree_leaves((args, kwargs)), *imported.source.tensors.values(), *expected])
    verdicts = judged(actual, expected, reference, call, dtype, precision)
    if not _are_right(verdicts):  # try without fast paths, which differ from PyTorch's definition at NaN and infinities
        # Eager FlexAttention ignores the blocks of its mask.
        again = compute if not imported.has_flex else lambda: reference()(args, kwargs)
        verdicts = _again(verdicts, actual, again, reference, call, dtype, precision)
    for lowest in FILLS if is_masked else ():
        if not _are_right(verdicts):  # a row of nothing but fills may be their average or 0
            reference().take_fills_for_masks(lowest)
            verdicts = _again(verdicts, actual, compute, reference, call, dtype, precision)
    seconds = time.perf_counter() - started
    wrong = {name: verdict for name, verdict in verdicts.items() if not verdict.is_right}
    if not wrong:
        worst = max(verdicts.values(), key=lambda verdict: verdict.error, default=None)
        rule = "it returns nothing to compare" if worst is None else str(worst)
        if rules:
            values = functools.partial(reference().values, args, kwargs)
            rule = f"{rule}; {rules.compare(imported, values, precision)}"
        return Verification(PASSED, rule, None if worst is None else worst.error, seconds)
    told = "; ".join(f"output {name}: {verdict}" for name, verdict in list(wrong.items())[:3])
    try:
        if peers is not None:
            raise UnsupportedError("it is not looked for in an engine that ranks divide; build it without mesh")
        with plain_pytorch():
            where = first_difference(imported, reference(), compiled, call, dtype, precision)
    except Exception as error:  # the search is a help, the finding stands without it
        where = f"The first module that differs was not found: {_line(error)}"
    raise VerificationError(
        f"the engine's result is not PyTorch's on the example inputs: {told}. {where}. "
        "verify=False builds it all the same"
    )


def results_and_states(engine, args: tuple, kwargs: dict) -> list:
    """The leaves of what an engine returns, then its states' new values; inputs and states stay as they were."""
    args, kwargs = on(engine.device_type, args), on(engine.device_type, kwargs)
    states = engine.signature.states
    if not states:
        return pytree.tree_leaves(engine(*args, **kwargs))
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    outputs = pytree.tree_leaves(engine(*args, **kwargs))
    given = engine.signature.flatten(args, kwargs)
    new = [engine.whole_state(x.name) if x.input is None else given[x.input] for x in states]
    engine.reset_state()
    return [*outputs, *new]


class Called(NamedTuple):
    """The leaves of a module's results, how long the call took, and its inputs and buffers as the call left them."""

    outputs: list
    seconds: float
    inputs: tuple[tuple, dict]
    buffers: dict[str, torch.Tensor]

    def with_states(self, engine) -> list:
        """The results, then the new values of an engine's states."""
        states = engine.signature.states
        if not states:
            return self.outputs
        given = engine.signature.flatten(*self.inputs)
        return [*self.outputs, *(self.buffers[x.name] if x.input is None else given[x.input] for x in states)]


def call_once(model, call: tuple, target) -> Called | None:
    """Call a module before its export: verification needs the results, and the model's own caches must fill.

    torch.export would fill a cache outside of the modules (functools.lru_cache, a global) with tensors that have no
    values, for good.  Returns None for a target whose device is not here, and where the call fails.  Buffers and inputs
    stay as they were.
    """
    if isinstance(model, torch.nn.Module) and _no_device(target.kind.name, str(target)) is None:
        with contextlib.suppress(Exception):
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            run = functools.partial(torch.func.functional_call, model, buffers)
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, _call(model, *call))
            started = time.perf_counter()
            with torch.compiler.set_stance("force_eager"):
                outputs = leaves_of_call(model, args, kwargs, run)
            return Called(outputs, time.perf_counter() - started, (args, kwargs), buffers)
    return None


def wider_dtype(tensors) -> torch.dtype | None:
    """The dtype in which errors are measured: wider than the tensors' narrowest; None without floating-point ones."""
    dtypes = {x.dtype for x in tensors if isinstance(x, torch.Tensor)} & WIDER.keys()
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return None if narrowest is None else WIDER[narrowest]


def moved(tensor: torch.Tensor, precision: torch.dtype | None = None) -> torch.Tensor:
    """The tensor with every element up or down by about one rounding of `precision`, or of its dtype, at random."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8).to(tensor.device) * 2 - 1
    eps = torch.finfo(precision or tensor.dtype).eps
    return torch.where(tensor.isfinite(), tensor + tensor * signs.to(tensor.dtype) * eps, tensor)


def judged(
    actual, expected, reference: "Once", inputs: tuple, dtype: torch.dtype | None, precision: torch.dtype | None = None
) -> dict[str, Verdict]:
    """The verdict on each output tensor; wider and moved computations are made once, if at all."""
    tensors = [(n, x, y) for n, (x, y) in enumerate(zip(actual, expected)) if isinstance(y, torch.Tensor)]
    wider = Once(lambda: None if dtype is None else _attempt(lambda: reference().precise(*inputs, dtype)))
    move = functools.partial(moved, precision=precision)
    rounded = Once(lambda: _attempt(lambda: reference()(*inputs, move)))
    summed = Once(lambda: _attempt(lambda: reference()(*inputs, move, sums=True)))

    def of(outputs: Once, n: int):
        return lambda: None if outputs() is None else outputs()[n]

    def is_choice(n: int):
        return lambda: reference().follows_from_a_choice(n)

    return {
        str(n): judge(*(x.to(y.device), y, of(wider, n), of(rounded, n), of(summed, n), precision), is_choice(n))
        for n, x, y in tensors
    }


def _again(
    verdicts, actual, compute: Callable, reference: "Once", inputs: tuple, dtype, precision
) -> dict[str, Verdict]:
    """Verdicts by PyTorch's results without fast paths, if these are right for all outputs; else `verdicts`."""
    with plain_pytorch():
        expected = _attempt(compute)
        if expected is None:
            return verdicts
        other = judged(actual, expected, reference, inputs, dtype, precision)
    return other if _are_right(other) else verdicts


def _are_right(verdicts: dict[str, Verdict]) -> bool:
    return all(verdict.is_right for verdict in verdicts.values())


def _call(model, args, kwargs) -> tuple[tuple, dict]:
    """The call's inputs; if none are given, those that the model carries; none if an ExportedProgram has none."""
    if isinstance(model, torch.nn.Module) or args or kwargs:
        return example_inputs(model, args, kwargs)
    return model.example_inputs or ((), {})


def _why_not(engine, inputs) -> str | None:
    """Why an engine cannot be compared here, or None."""
    if engine.signature.inputs and not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(inputs)):
        return "there are no example inputs to call it with"
    return why_not_verified(engine.device_type, engine.report().target, inputs)


def why_not_verified(kind: str, target: str, inputs) -> str | None:
    """Why code for a target, given as JSON, cannot be compared here on these inputs, or None.

    `kind` is "cuda" or that of a CPU.
    """
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    if any(x.is_meta or isinstance(x, torch._subclasses.FakeTensor) for x in tensors):
        return "the example inputs have no values"
    return _no_device(kind, target)


def _no_device(kind: str, target: str) -> str | None:
    """Why code for a target, given as JSON, cannot run here, or None; `kind` is "cuda" or that of a CPU."""
    if kind != "cuda":
        why = why_not_here(target)
        return None if why is None else f"no such device: {why}"
    here, wanted = local_cuda_arch(), str(json.loads(target)["arch"])
    if here is None:
        return "no such device: there is no CUDA GPU here"
    same = architecture_number(here) == architecture_number(wanted)
    return None if same else f"no such device: it is for {wanted}, here is {here}"


def leaves_of_call(model: torch.nn.Module, args: tuple, kwargs: dict, run: Callable | None = None) -> list:
    """The leaves of what a model returns as it is exported: in evaluation mode, without gradients, without a cache.

    `run(args, kwargs)` replaces the model's own call.  The model's modes and configurations are restored.  Raises
    ExportError for results without values, of a cache outside of the modules that an export has filled.
    """
    training = [module for module in model.modules() if module.training]
    token = by_pytorch.set(True)
    try:
        model.eval()
        with torch.no_grad(), without_cache(model, kwargs):
            outputs = pytree.tree_leaves(model(*args, **kwargs) if run is None else run(args, kwargs))
        if any(isinstance(x, torch._subclasses.FakeTensor) for x in outputs):
            raise ExportError(f"PyTorch's own results of {type(model).__name__} are tensors without values.{CACHES}")
        return outputs
    finally:
        by_pytorch.reset(token)
        for module in training:
            module.training = True


def _attempt(compute: Callable):
    """The result of `compute`, or None where PyTorch cannot: an operator without that dtype, too little memory."""
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError):
        return compute()
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Once:
    """A computation that runs at its first call; later calls return the same value."""

    def __init__(self, compute: Callable):
        self.compute, self.is_done, self.value = compute, False, None

    def __call__(self):
        if not self.is_done:
            self.value, self.is_done = self.compute(), True
        return self.value
