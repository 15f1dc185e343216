"""`build(context_parallel=…)`: from a model to the ContextEngine of a rank, compared with PyTorch."""

import dataclasses
import functools
import operator
import time
import zlib
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from relax_passes.attention.site_names import named
from stof_tvm.dynamo.autocast import refuse_autocast
from stof_tvm.frontend import import_model
from stof_tvm.frontend.export import example_inputs
from stof_tvm.frontend.import_model import refuse_arrays, refuse_meta
from stof_tvm.frontend.packing.batched import Batched, batched_of_module
from stof_tvm.frontend.packing.program import FIXED, OF_TOKENS, SHARED, PackedProgram, pack
from stof_tvm.frontend.packing.rewriter import PLACE, Purpose
from stof_tvm.frontend.snapshot import Snapshot
from stof_tvm.masks.mask import Mask
from stof_tvm.parallel.contents import contents_of
from stof_tvm.parallel.context.engine import ContextEngine
from stof_tvm.parallel.context.plan import LEAST_TOKENS, ContextPlan, plan_of
from stof_tvm.parallel.context.site_attentions import SiteAttentions
from stof_tvm.parallel.ranks import Peers
from stof_tvm.report import Verification
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification.reference import Reference
from stof_tvm.verification.verify import (
    NOT_VERIFIED,
    PASSED,
    PYTORCH_FAILS,
    SKIPPED,
    TF32_PRECISION,
    Once,
    call_once,
    judged,
    leaves_of_call,
    why_not_verified,
    wider_dtype,
)
from tir_kernels.errors import InputError, UnsupportedError, VerificationError

SHARING = Purpose((PLACE,), "cannot be computed by ranks that share a sequence", "leave context_parallel out")
SOME = 64  # tokens of a row that only tells which attentions there are


def context_engine(
    model, call: tuple, peers: Peers, site_masks: SiteMasks, target, float32: str, verify: bool, build_row: Callable
) -> ContextEngine:
    """The ContextEngine of a module; every rank calls it with the same arguments.

    Parameters
    ----------
    model : torch.nn.Module
    call : (tuple or None, dict or None)
        The example call, as `build` was given it, of whole sequences.
    peers : Peers
    site_masks : SiteMasks
        The user's masks, of positions in the sequence.
    target : tvm.target.Target
    float32 : str
        As `build` has it.
    verify : bool
        Compare results with PyTorch's of the example.
    build_row : callable
        `build_row(program, (args, kwargs), snapshot, name_of)` is the Engine of a row's program, whose attentions are
        the packed functions that `name_of` names.

    Raises InputError for inputs without batch and tokens, UnsupportedError for what cannot be computed token by token,
    and what `build` raises.
    """
    batched, snapshot, args, kwargs = peers.step(
        "import",
        lambda: _exported(model, call, target, verify),
        lambda found: contents_of(found[0].program, found[0].tensors.values(), found[2:]),
    )
    engine = peers.step(
        "compilation",
        lambda: _compiled(batched, snapshot, (args, kwargs), peers, site_masks, float32, build_row),
    )
    outcome = SKIPPED
    if verify:
        outcome = peers.step("verification", lambda: _verified(engine, model, (args, kwargs), site_masks, peers))
    engine.set_verification(outcome)
    return engine


def _exported(model, call: tuple, target, verify: bool) -> tuple[Batched, Snapshot, tuple, dict]:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"context_parallel is for a torch.nn.Module, got {type(model).__name__}")
    refuse_meta(model)
    refuse_autocast(model.parameters(), "build the engine")
    refuse_arrays(*call)
    args, kwargs = example_inputs(model, *call)
    if verify:
        call_once(model, (args, kwargs), target)  # what it caches must not be what torch.export makes
    batched = batched_of_module(model, args, kwargs, None, all_lengths=False)
    if batched.padding:
        raise UnsupportedError(
            f"{batched.padding} tells tokens from padding, and ranks share whole sequences: leave it out of the "
            "example inputs, or context_parallel"
        )
    snapshot = Snapshot(batched.program)
    assert isinstance(snapshot.model, torch.export.ExportedProgram)
    return dataclasses.replace(batched, program=snapshot.model), snapshot, args, kwargs


def _compiled(
    batched: Batched, snapshot: Snapshot, call: tuple, peers: Peers, site_masks: SiteMasks, float32: str, build_row
) -> ContextEngine:
    length = batched.longest
    if length < LEAST_TOKENS * peers.count:
        raise InputError(f"{length} tokens are fewer than {LEAST_TOKENS} for each of {peers.count} ranks")
    batch = next(len(x) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor) and x.dim() > 1)
    own = batched.own_masks()
    some = pack(batched, own, SOME, 1, SHARING)
    _refuse_sequences(some)
    masks = {path: _mask(path, some, batch, length, site_masks) for path in some.masks}
    plan = peers.step(
        "masks",
        lambda: _plan(masks, some, batch, length, peers.count),
        lambda plan: {"plan": plan.layout.digest[:12], "mask": _checksum(plan, masks, some.heads, batch)},
    )
    row = batch * len(plan.positions(peers.rank))
    packed = some if row == SOME else pack(batched, own, row, 1, SHARING)
    nodes = packed.program.graph.find_nodes(op="placeholder")
    examples = {x.name: torch.zeros(x.meta["val"].shape, dtype=x.meta["val"].dtype) for x in nodes}
    attentions = SiteAttentions(peers, plan, masks, batch, float32)
    engine = build_row(
        packed.program, (tuple(examples[name] for name in packed.inputs), {}), snapshot, attentions.name_of
    )
    engine.belongs_to(peers, {})
    for path in sorted(masks.keys() - attentions.sites.keys()):
        raise UnsupportedError(
            f"the attention {named(path)} is not recognised, so its keys would not be exchanged: leave "
            "context_parallel out"
        )
    site_masks.check(list(attentions.sites.values()))
    return ContextEngine(engine, batched, packed, attentions, peers)


def _refuse_sequences(packed: PackedProgram) -> None:
    """UnsupportedError for what a program takes or returns for each sequence as a whole."""
    if packed.depends_on_sequences or any(x.kind not in (OF_TOKENS, SHARED, FIXED) for x in packed.outputs):
        raise UnsupportedError(
            "the model takes or returns something for each sequence as a whole: ranks that share sequences compute "
            "each token by itself; leave context_parallel out"
        )


def _mask(path: str, packed: PackedProgram, batch: int, length: int, site_masks: SiteMasks) -> Mask | None:
    """What an attention keeps: its own mask and the user's."""
    given = site_masks.given_for(path, (batch, packed.heads[path], length, length))
    parts = [mask for mask in (packed.masks[path], given) if mask is not None]
    return functools.reduce(operator.and_, parts) if parts else None


def _plan(masks: dict, packed: PackedProgram, batch: int, length: int, ranks: int) -> ContextPlan:
    """The plan of the mask with the most work."""
    if not masks:
        raise UnsupportedError("the model has no attention that is recognised: each rank can compute its own tokens")
    heads = {mask: packed.heads[path] for path, mask in masks.items()}
    plans = [plan_of(mask, (batch, count, length, length), ranks) for mask, count in heads.items()]
    return max(plans, key=lambda plan: int(plan.work.sum()))


def _checksum(plan: ContextPlan, masks: dict[str, Mask | None], heads, batch: int) -> int:
    """A checksum of what the masks of all attentions keep, by their paths."""
    sizes = {path: (batch, heads[path], plan.length, plan.length) for path in masks}
    digests = [(path, plan_of(mask, sizes[path], plan.ranks, plan.layout).digest) for path, mask in masks.items()]
    return zlib.crc32(repr(sorted(digests)).encode())


def _verified(engine: ContextEngine, model, call: tuple, site_masks: SiteMasks, peers: Peers) -> Verification:
    """The Verification on the example; VerificationError where results are not PyTorch's."""
    report = engine.report()
    if (reason := why_not_verified(engine.device_type, report.target, call)) is not None:
        return Verification(NOT_VERIFIED, reason)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(engine.device), call)
    results = peers.step("first call", lambda: pytree.tree_leaves(engine(*args, **kwargs)))
    started = time.perf_counter()
    sites = list(engine._attentions.sites.values())
    is_masked = any(site_masks.is_given(site.site) for site in sites)
    reference = Once(lambda: Reference(import_model(model, *call), sites, site_masks.given_for))
    if is_masked and reference().untied:
        return Verification(NOT_VERIFIED, reference().why_untied)
    try:
        expected = reference()(*call) if is_masked else leaves_of_call(model, *call)
    except Exception as error:  # whatever a model raises
        return Verification(
            NOT_VERIFIED, f"{PYTORCH_FAILS}: {' '.join(f'{type(error).__name__}: {error}'.split())}"[:200]
        )
    dtype = wider_dtype([*pytree.tree_leaves(call), *model.parameters(), *expected])
    precision = TF32_PRECISION if report.float32 == "tf32" else None
    for name, verdict in (verdicts := judged(results, expected, reference, call, dtype, precision)).items():
        if not verdict.is_right:
            raise VerificationError(
                f"the engine's result is not PyTorch's on the example inputs: output {name}: {verdict}. verify=False "
                "builds it all the same"
            )
    worst = max(verdicts.values(), key=lambda verdict: verdict.error)
    return Verification(PASSED, str(worst), worst.error, time.perf_counter() - started)
