"""From a model to its PackedEngine, compared with PyTorch on the sequences of the example, each alone."""

import dataclasses
from collections.abc import Callable

import torch

from stof_tvm.dynamo.autocast import refuse_autocast
from stof_tvm.frontend.export import example_inputs
from stof_tvm.frontend.import_model import refuse_arrays, refuse_meta
from stof_tvm.frontend.packing.batched import batched_of_module
from stof_tvm.frontend.snapshot import Snapshot
from stof_tvm.packed.packed_engine import PackedEngine
from stof_tvm.packed.row_engines import RowEngines
from stof_tvm.packed.verify import verified
from stof_tvm.running.gpus import current_device
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification.verify import SKIPPED, call_once
from tir_kernels.errors import InputError


def packed_engine(
    model, call: tuple, without_padding, given, target, verify: bool, build_one: Callable
) -> PackedEngine:
    """The PackedEngine of a module.

    Parameters
    ----------
    model : torch.nn.Module
    call : (tuple or None, dict or None)
        The example call, as `build` was given it.
    without_padding : True or str
        The name of the padding mask, if it is not a usual one.
    given
        The user's masks, of positions in a sequence, as `build` takes them.
    target : tvm.target.Target
    verify : bool
        Compare results with PyTorch's of the example's sequences.
    build_one : callable
        As RowEngines has it.

    Raises InputError for inputs without batch and tokens, UnsupportedError for what cannot be computed without padding,
    and what `build` raises.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"without_padding is for a torch.nn.Module, got a {type(model).__name__}")
    refuse_meta(model)
    refuse_autocast(model.parameters(), "build the engine")
    refuse_arrays(*call)
    args, kwargs = example_inputs(model, *call)
    padding = without_padding if isinstance(without_padding, str) else None
    if verify:
        call_once(model, (args, kwargs), target)  # what it caches must not be what torch.export makes
    batched = batched_of_module(model, args, kwargs, padding)
    snapshot = Snapshot(batched.program)
    assert isinstance(snapshot.model, torch.export.ExportedProgram)
    batched = dataclasses.replace(batched, program=snapshot.model)
    site_masks = SiteMasks(given)
    device = current_device(target.kind.name)
    rows = RowEngines(batched, snapshot, site_masks.given_for, build_one, device)
    engine = PackedEngine(rows, str(target))
    layout, _ = engine.example(args, kwargs)
    site_masks.check(rows.compiled(layout).engine.report().sites)
    engine.set_verification(verified(engine, model, (args, kwargs), site_masks) if verify else SKIPPED)
    return engine
