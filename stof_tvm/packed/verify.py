"""Compares a PackedEngine's results with what PyTorch gives for sequences of the example, each alone."""

import dataclasses
import functools
import time
import warnings

import torch
from torch.utils import _pytree as pytree

from stof_tvm.frontend import import_model
from stof_tvm.frontend.packing.program import FIXED, OF_TOKENS, Output
from stof_tvm.packed.layout import Layout
from stof_tvm.packed.packed_engine import PackedEngine
from stof_tvm.report import Report, Verification
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification.comparison import Verdict
from stof_tvm.verification.reference import Reference
from stof_tvm.verification.verify import (
    NOT_VERIFIED,
    PASSED,
    PYTORCH_FAILS,
    TF32_PRECISION,
    Once,
    judged,
    leaves_of_call,
    why_not_verified,
    wider_dtype,
)
from tir_kernels.errors import VerificationError

MOST_SEQUENCES = 4  # of different lengths


def verified(engine: PackedEngine, model: torch.nn.Module, call: tuple, site_masks: SiteMasks) -> Verification:
    """The Verification of an engine on an example call; VerificationError where results are not PyTorch's.

    Parameters
    ----------
    engine : PackedEngine
    model : torch.nn.Module
    call : (tuple, dict)
        The example.
    site_masks : SiteMasks
        The user's masks, of positions in a sequence.
    """
    report = engine.report()
    if (reason := why_not_verified(engine.device_type, report.target, call)) is not None:
        return Verification(NOT_VERIFIED, reason)
    started = time.perf_counter()
    layout, outputs = engine.example(*call)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(engine.device), call)
    results = pytree.tree_leaves(engine(*args, **kwargs, **({} if engine.padding else {"lengths": layout.lengths})))
    precision = TF32_PRECISION if report.float32 == "tf32" else None
    is_masked = any(site_masks.is_given(site.site) for site in report.sites)
    verdicts: dict[str, Verdict] = {}
    for row in _rows(layout):
        alone = engine.alone(call, layout, row)
        reference = Once(functools.partial(_reference, model, alone, report, site_masks, layout.lengths[row]))
        if is_masked and reference().untied:
            return Verification(NOT_VERIFIED, reference().why_untied)
        try:
            expected = reference()(*alone) if is_masked else leaves_of_call(model, *alone)
        except Exception as error:  # whatever a model raises
            why = f"{PYTORCH_FAILS}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
            warnings.warn(f"the engine was not verified: {why}", stacklevel=2)
            return Verification(NOT_VERIFIED, why)
        leaves = zip(results, engine.signature.out_leaves, strict=True)
        actual = [x if leaf.tensor is None else _part(x, outputs[leaf.tensor], layout, row) for x, leaf in leaves]
        dtype = wider_dtype([*pytree.tree_leaves(alone), *model.parameters(), *expected])
        found = judged(actual, expected, reference, alone, dtype, precision)
        verdicts.update({f"{name} of sequence {row}": verdict for name, verdict in found.items()})
    for name, verdict in verdicts.items():
        if not verdict.is_right:
            raise VerificationError(
                f"the engine's result is not PyTorch's for the sequence alone: output {name}: {verdict}. verify=False "
                "builds it all the same"
            )
    worst = max(verdicts.values(), key=lambda verdict: verdict.error)
    detail = f"{len(_rows(layout))} sequences, each alone; {worst}"
    return Verification(PASSED, detail, worst.error, time.perf_counter() - started)


def _rows(layout: Layout) -> list[int]:
    """Some rows of the batch, of different lengths, the longest and the shortest among them."""
    by_length = {length: row for row, length in enumerate(layout.lengths)}
    ordered = [by_length[length] for length in sorted(by_length)]
    step = max(1, -(-len(ordered) // (MOST_SEQUENCES - 1)))
    return sorted({*ordered[::step], ordered[-1]})


def _part(x: torch.Tensor, output: Output, layout: Layout, row: int) -> torch.Tensor:
    """What a result of the batch has for one sequence, in the shape that the sequence alone has."""
    if output.kind == FIXED:
        return x
    length, offset = layout.lengths[row], layout.offsets[row]
    if output.kind == OF_TOKENS and output.token == output.batch:
        return x.narrow(output.batch, row * layout.width + offset, length)
    x = x.narrow(output.batch, row, 1)
    return x.narrow(output.token, offset, length) if output.kind == OF_TOKENS else x


def _reference(model, alone: tuple, report: Report, site_masks: SiteMasks, length: int) -> Reference:
    """PyTorch's results of a sequence alone, with the user's masks."""
    sites = [
        dataclasses.replace(site, shape=dataclasses.replace(site.shape, q_len=length, kv_len=length))
        for site in report.rewritten
    ]
    return Reference(import_model(model, *alone), sites, site_masks.given_for)
