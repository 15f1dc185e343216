"""Moves: the paper's worked example digit by digit, and that none leaves the legal schemes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relax_passes.fusion.operators import ATTENTION, CI, MI, Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, is_legal
from relax_passes.fusion.schemes.moves import compete, expand, seize
from tests.relax_passes.fusion.graphs import operator_graphs

# A BERT layer as the paper counts it: attention is five operators, the residual of #8 is the layer's input.
BERT_LAYER = [
    Operator("matmul", CI),
    Operator("add", MI, (0,)),
    Operator("matmul", ATTENTION, (1,), "attention"),
    Operator("scale", ATTENTION, (2,), "attention"),
    Operator("mask", ATTENTION, (3,), "attention"),
    Operator("softmax", ATTENTION, (4,), "attention"),
    Operator("matmul", ATTENTION, (5,), "attention"),
    Operator("matmul", CI, (6,)),
    Operator("add", MI, (7,)),
    Operator("layer_norm", MI, (8,)),
    Operator("matmul", CI, (9,)),
    Operator("add_gelu", MI, (10,)),
    Operator("matmul", CI, (11,)),
    Operator("add", MI, (9, 12)),
    Operator("layer_norm", MI, (13,)),
]
S0 = "0 1 00000 11 0 111 00"
S1 = "00 11111 00 1 000 11"
S2 = "00 11111 00 1 0000 1"
S3 = "00 11111 000 1111 0"


@pytest.mark.parametrize("move, before, after", [(expand, S0, S1), (seize, S1, S2), (compete, S2, S3)])
def test_the_papers_example(move, before, after):
    candidates = move(FusionScheme(before), BERT_LAYER)
    assert after in [str(scheme) for scheme in candidates]


def test_expand_merges_every_legal_pair():
    """Not across the attention, and not into a third matrix product."""
    merged = {str(scheme) for scheme in expand(FusionScheme(S0), BERT_LAYER)}
    assert merged == {
        "00 11111 00 1 000 11",
        "0 1 00000 111 000 11",
        "0 1 00000 11 0000 11",
        "0 1 00000 11 0 11111",
    }


def test_seize_needs_a_product_and_leaves_something():
    """[#13 #14] loses #13 to the two products before it; the single operators #1 and #9 have nothing to leave."""
    assert [str(scheme) for scheme in seize(FusionScheme(S0), BERT_LAYER)] == ["0 1 00000 11 0 1111 0"]


def test_compete_prefers_the_segment_with_one_product():
    """#9 lies between one product and two; as part of the latter it goes over, too."""
    alone, taken = FusionScheme(S2), FusionScheme("00 11111 00 11111 0")
    assert [str(scheme) for scheme in compete(alone, BERT_LAYER)] == [S3]
    assert S3 in [str(scheme) for scheme in compete(taken, BERT_LAYER)]


def test_compete_offers_both_where_both_have_one_product():
    operators = [Operator("matmul", CI), Operator("gelu", MI, (0,)), Operator("matmul", CI, (1,))]
    assert {str(scheme) for scheme in compete(FusionScheme("0 1 0"), operators)} == {"00 1", "0 11"}


@given(operator_graphs(), st.data())
def test_moves_stay_legal_and_do_what_they_say(operators, data):
    scheme = FusionScheme(data.draw(st.text("01", min_size=len(operators), max_size=len(operators))))
    assume(is_legal(scheme, operators))
    before = scheme.segments
    for move, change in ((expand, -1), (seize, 0)):
        for candidate in move(scheme, operators):
            assert is_legal(candidate, operators) and candidate != scheme
            assert len(candidate.segments) == len(before) + change
    for candidate in compete(scheme, operators):
        assert is_legal(candidate, operators) and candidate != scheme
        assert len(candidate.segments) - len(before) in (0, -1)
    for candidate in seize(scheme, operators):
        moved = [i for i in range(len(operators)) if _mates(candidate, i) != _mates(scheme, i)]
        assert any(operators[i].kind == MI for i in moved)


def _mates(scheme, i):
    return next(segment for segment in scheme.segments if i in segment)
