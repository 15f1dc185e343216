"""On LLVM, a model computes the same whatever legal scheme cuts it."""

import itertools
import random

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, check_segment, is_legal
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.pipeline import run_pipeline
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.families import BertLike
from tests.models.quick_llvm import QUICK_LLVM as LLVM
from tests.models.quick_llvm import run_linked
from tests.relax_passes.fusion.fake_templates import template
from tests.relax_passes.fusion.modules import gated_mlp, inputs_of, pre_norm_mlp
from tir_kernels.errors import SchemeError

MASK = SiteMasks(masks.sliding_window(3))


def lower(mod, scheme, templates=()):
    """An operator module under a scheme, ready to run."""
    chooser = TemplateChooser(LLVM, list(templates))
    with LLVM:
        mod = LowerSegments(chooser)(PartitionSegments(scheme)(mod))
        mod = run_pipeline(mod, LLVM, MASK, after="lower_segments")
        return run_linked(relax.build(mod, LLVM, relax_pipeline=None))["main"]


def outputs(program, values) -> list[np.ndarray]:
    result = program(*(tvm.runtime.tensor(value) for value in values))
    return [x.numpy() for x in (result if isinstance(result, tuple | list | tvm.ir.Array) else [result])]


def legal_schemes(operators) -> list[FusionScheme]:
    rests = itertools.product("01", repeat=len(operators) - 1)
    schemes = (FusionScheme("0" + "".join(rest)) for rest in rests)
    return [scheme for scheme in schemes if is_legal(scheme, operators)]


def assert_agree(mod, schemes, templates=()):
    values = inputs_of(mod)
    finest = FusionScheme.from_lengths([1] * len(OperatorGraph(mod["main"]).operators))
    expected = outputs(lower(mod, finest), values)
    for scheme in schemes:
        for actual, wanted in zip(outputs(lower(mod, scheme, templates), values), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=2e-5, err_msg=str(scheme))


def covering(schemes) -> list[FusionScheme]:
    """Few of the schemes, in which every segment of all of them occurs: segments are lowered one by one."""
    segments = {scheme: {(s.start, s.stop) for s in scheme.segments} for scheme in schemes}
    chosen, missing = [], set().union(*segments.values())
    while missing:
        chosen.append(max(schemes, key=lambda scheme: len(segments[scheme] & missing)))
        missing -= segments[chosen[-1]]
    return chosen


@pytest.mark.parametrize("templates", [[], [template()]], ids=["default", "templates"])
@pytest.mark.parametrize("make", [pre_norm_mlp, gated_mlp])
def test_every_legal_segment_of_a_small_mlp(make, templates):
    mod = make()
    schemes = legal_schemes(OperatorGraph(mod["main"]).operators)
    assert len(schemes) > 30
    assert_agree(mod, covering(schemes), templates)


@pytest.fixture(scope="module")
def bert():
    """A two-layer BERT of width 32 at length 16: the module before partitioning, its input and PyTorch's output."""
    torch.manual_seed(0)
    model = BertLike(layers=2, length=16).eval()
    ids = torch.randint(0, 50, (1, 16))
    mod = run_pipeline(import_model(model, (ids,)).mod, LLVM, SiteMasks(None), until="canonicalize_operators")
    with torch.no_grad():
        expected = [x.numpy() for x in model(ids)]
    return mod, ids.numpy(), expected


def random_scheme(operators, source: random.Random) -> FusionScheme:
    """A legal scheme: from the left, a segment of any length that is legal."""
    lengths, start = [], 0
    while start < len(operators):
        ends = [end for end in range(start + 1, len(operators) + 1) if _is_segment(range(start, end), operators)]
        lengths.append(source.choice(ends) - start)
        start += lengths[-1]
    return FusionScheme.from_lengths(lengths)


def _is_segment(segment, operators) -> bool:
    try:
        check_segment(segment, operators)
    except SchemeError:
        return False
    return True


def check_bert(bert, seed, templates):
    mod, ids, expected = bert
    operators = OperatorGraph(mod["main"]).operators
    scheme = random_scheme(operators, random.Random(seed))
    assert is_legal(scheme, operators)
    for actual, wanted in zip(outputs(lower(mod, scheme, templates), [ids]), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, err_msg=str(scheme))


@pytest.mark.parametrize("templates", [[], [template()]], ids=["default", "templates"])
@pytest.mark.parametrize("seed", range(2))
def test_schemes_of_a_two_layer_bert(bert, seed, templates):
    check_bert(bert, seed, templates)


@pytest.mark.slow
@pytest.mark.parametrize("templates", [[], [template()]], ids=["default", "templates"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_more_schemes_of_a_two_layer_bert(bert, seed, templates):
    check_bert(bert, seed, templates)
