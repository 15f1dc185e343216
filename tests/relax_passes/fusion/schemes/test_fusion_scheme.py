"""Schemes: encoding, canonical form, and the rules, on random graphs and by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_passes.fusion.operators import ATTENTION, CI, MI, Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, check_scheme, check_segment, is_legal
from tests.relax_passes.fusion.graphs import operator_graphs
from tir_kernels.errors import SchemeError, StofError

digits = st.text("01", max_size=40)
lengths = st.lists(st.integers(1, 6), max_size=12)


def test_equal_neighbours_are_one_segment():
    scheme = FusionScheme("0 1 00000 111 000 11")
    assert scheme.segments == (range(0, 1), range(1, 2), range(2, 7), range(7, 10), range(10, 13), range(13, 15))
    assert str(scheme) == "0 1 00000 111 000 11" and len(scheme) == 15


@given(digits)
def test_a_scheme_and_its_complement_are_one(text):
    scheme, complement = FusionScheme(text), FusionScheme(text.translate(str.maketrans("01", "10")))
    assert scheme == complement and hash(scheme) == hash(complement)
    assert not scheme.digits.startswith("1")


@given(digits)
def test_hex_and_text_round_trip(text):
    scheme = FusionScheme(text)
    assert FusionScheme.parse(scheme.hex) == FusionScheme.parse(str(scheme)) == scheme


@given(digits, digits)
def test_different_schemes_have_different_hex(a, b):
    a, b = FusionScheme(a), FusionScheme(b)
    assert (a == b) == (a.hex == b.hex)


@given(lengths, st.randoms())
def test_segments_round_trip_in_any_order(lengths, random):
    scheme = FusionScheme.from_lengths(lengths)
    assert [len(segment) for segment in scheme.segments] == lengths
    segments = [list(segment) for segment in scheme.sets]
    random.shuffle(segments)
    for segment in segments:
        random.shuffle(segment)
    assert FusionScheme.from_segments(segments) == scheme
    assert FusionScheme.from_segments(segments).sets == scheme.sets


@pytest.mark.parametrize(
    "make, rule",
    [
        (lambda: FusionScheme("0 1 2"), "digit 2 of the scheme is '2'"),
        (lambda: FusionScheme.parse("0xyz"), "'0xyz' is not a hexadecimal scheme"),
        (lambda: FusionScheme.parse("-1"), "digit 0 of the scheme is '-'"),
        (lambda: FusionScheme.from_segments([{0, 2}, {1}]), r"#1 is missing where segment \[0, 2\] goes on with #2"),
        (lambda: FusionScheme.from_segments([{0, 1}, {1}]), r"#2 is missing where segment \[1\] goes on with #1"),
        (lambda: FusionScheme.from_segments([{1}]), "#0 is missing"),
    ],
)
def test_what_is_no_scheme(make, rule):
    with pytest.raises(SchemeError, match=rule):
        make()


CHAIN = [
    Operator("matmul", CI),
    Operator("add", MI, (0,)),
    Operator("attention", ATTENTION, (1,), "a"),
    Operator("matmul", CI, (2,)),
    Operator("add", MI, (3, 1)),
    Operator("matmul", CI, (4,)),
    Operator("matmul", CI, (1,)),
    Operator("multiply", MI, (5, 6)),
]


@pytest.mark.parametrize(
    "text, rule",
    [
        ("0000000", "7 digits for 8 operators: operator #7 'multiply' has none"),
        ("000000000", "9 digits for 8 operators"),
        ("0 11 00000", "operator #1 'add' shares a segment with an attention"),
        ("00 1 00000", "operator #6 'matmul' is one too many: a segment has at most 2 compute-intensive"),
        ("00 1 00 11 0", "operator #6 'matmul' is not connected with #5"),
    ],
)
def test_an_illegal_scheme_names_operator_and_rule(text, rule):
    with pytest.raises(StofError, match=rule):
        check_scheme(FusionScheme(text), CHAIN)
    assert not is_legal(FusionScheme(text), CHAIN)


def test_a_legal_scheme_passes():
    check_scheme(FusionScheme("00 1 00 1 00"), CHAIN)


def test_two_that_read_one_operator_are_connected():
    """As the rotations of a query and a key that one projection holds."""
    check_segment({1, 2}, [Operator("matmul", CI), Operator("multiply", MI, (0,)), Operator("multiply", MI, (0,))])


def test_a_group_that_is_left_and_entered_again_is_refused():
    """No interval of the order can be one; a set of sets can."""
    with pytest.raises(SchemeError, match="operator #1 'add' lies on a path from the segment of #2 back to it"):
        check_segment({0, 2}, [Operator("matmul", CI), Operator("add", MI, (0,)), Operator("gelu", MI, (1,))])


def test_an_attention_of_several_operators_stays_whole():
    operators = [Operator(name, ATTENTION, tuple(range(i))[-1:], "a") for i, name in enumerate(("matmul", "softmax"))]
    check_scheme(FusionScheme("00"), operators)
    with pytest.raises(SchemeError, match="operator #1 'softmax' is cut off from its attention"):
        check_scheme(FusionScheme("01"), operators)


@given(operator_graphs(), st.data())
def test_the_rules_mean_what_they_say(operators, data):
    """Against definitions: reachability for convexity and connection, counting for the rest."""
    scheme = FusionScheme(data.draw(st.text("01", min_size=len(operators), max_size=len(operators))))
    assert is_legal(scheme, operators) == all(_is_segment(segment, operators) for segment in scheme.segments)


@given(operator_graphs(), st.data())
def test_any_set_is_judged_by_paths(operators, data):
    group = data.draw(st.sets(st.integers(0, len(operators) - 1), min_size=1))
    try:
        check_segment(group, operators)
        accepted = True
    except SchemeError:
        accepted = False
    assert accepted == _is_segment(group, operators)


def _is_segment(group, operators) -> bool:
    group = set(group)
    after = {i: {j for j, o in enumerate(operators) if i in o.inputs} for i in range(len(operators))}
    reach = {}
    for i in reversed(range(len(operators))):
        reach[i] = set().union(*({j} | reach[j] for j in after[i]))
    is_convex = not any(
        j in reach[i] and k in reach[j] for i in group for j in set(range(len(operators))) - group for k in group
    )
    component, grown = set(), {min(group)}
    while grown != component:
        component = grown
        grown = component | {i for i in group for j in component if i in after[j] or j in after[i] or i == j}
        grown |= {i for i in group for j in component if set(operators[i].inputs) & set(operators[j].inputs)}
    kinds = [operators[i].kind for i in group]
    sites = {operators[i].site for i in group}
    whole = all(i in group for i, o in enumerate(operators) if o.kind == ATTENTION and o.site in sites - {""})
    is_alone = ATTENTION not in kinds or (set(kinds) == {ATTENTION} and len(sites) == 1 and whole)
    return is_convex and component == group and kinds.count(CI) <= 2 and is_alone
