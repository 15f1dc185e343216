"""Scores capped by tanh against PyTorch's numbers; what is refused, and why."""

import json

import pytest
import torch
from tvm import relax

from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.layouts.upright_scores import UprightScores
from relax_passes.attention.rewrite_masked_attention import SITES, RewriteMaskedAttention
from stof_tvm import masks
from tests.models.running import largest_error
from tests.relax_passes.attention.near_misses import inputs
from tests.relax_passes.attention.programs import All, program_of, reasons
from tests.relax_passes.attention.softcap_programs import CAPS, PROGRAMS
from tir_kernels.target import parse_target

ACCEPTED = [program for program in PROGRAMS if program.reason is None]
NAMES = [program.name for program in PROGRAMS]


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=NAMES)
def test_numbers_are_those_of_pytorch(compiled, index):
    assert largest_error(compiled.outputs[index], compiled.expected[index]) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_what_is_proved_becomes_attention_with_a_softcap_and_nothing_else(compiled, program):
    found = reasons(compiled.mod, program)
    calls = [call for site, call in compiled.calls.items() if program_of(site) == program.name]
    assert len(found) == (program.reason is not None)
    if program.reason is not None:
        assert program.reason in found[0] and not calls
        return
    assert len(calls) == 1, found
    scale, softcap = CAPS[program.name]
    assert calls[0].softcap == pytest.approx(softcap) and calls[0].scale == pytest.approx(abs(scale))
    assert "tanh" in calls[0].spelling


def test_kernels_cap_the_scores(compile_model):
    """The rewritten programs: the same numbers, and a note in the report."""
    passes = [UprightScores(), CanonicalizeAttention(), FoldMasks()]
    own = lambda site: None if site.constant is None else masks.from_tensor(torch.from_numpy(site.constant))
    passes.append(RewriteMaskedAttention(parse_target("llvm"), own))
    passes.append(relax.transform.DeadCodeElimination())
    compiled = compile_model(All(ACCEPTED), inputs(), passes=passes)
    sites = json.loads(compiled.mod.attrs[SITES])
    assert len(sites) == len(ACCEPTED) and [site for site in sites if not site["rewritten"]] == []
    for site in sites:
        assert f"scores capped at {CAPS[program_of(site['site'])][1]:g} by tanh" in site["notes"]
    for program, output, expected in zip(ACCEPTED, compiled.outputs, compiled.expected, strict=True):
        assert largest_error(output, expected) < 2e-5, program.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_recognised_as_well(compile_model, dtype):
    q, k, v, keep, added = inputs()
    # These fill in numbers that half precision has not, or add a tensor of float32.
    float32 = ("as_gemma_has_it", "masked_by_a_fill", "masked_at_run_time")
    programs = [x for x in ACCEPTED if x.name not in float32]
    compiled = compile_model(All(programs), (q.to(dtype), k.to(dtype), v.to(dtype), keep, added))
    found = {program_of(site): call for site, call in compiled.calls.items() if call.softcap is not None}
    assert found.keys() == {program.name for program in programs}
    assert {str(call.q.ty.dtype) for call in found.values()} == {str(dtype).removeprefix("torch.")}
    eps = torch.finfo(dtype).eps
    for program, output, expected in zip(programs, compiled.outputs, compiled.expected, strict=True):
        assert largest_error(output, expected) < 16 * eps, program.name
