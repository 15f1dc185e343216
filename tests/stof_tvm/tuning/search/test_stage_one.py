"""Stage 1 on small graphs with times that are made up: it finds the best scheme, at little cost."""

from itertools import product

import pytest

from relax_passes.fusion.operators import CI, MI, Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, is_legal
from stof_tvm.tuning.search.stage_one import StageOne, changed

# matmul add gelu matmul add layer_norm, one after the other
CHAIN = tuple(
    Operator(name, CI if name == "matmul" else MI, (i - 1,) if i else ())
    for i, name in enumerate(["matmul", "add", "gelu", "matmul", "add", "layer_norm"])
)


def made_up_us(segment: range) -> float:
    """A launch, ten for a product, a hundred where two products share a segment."""
    products = sum(CHAIN[i].kind == CI for i in segment)
    return 5.0 + 10.0 * products + 100.0 * (products > 1) + 0.1 * len(segment)


def search(us=made_up_us, operators=CHAIN, start="000111", max_moves=100, predict=lambda segment: 1.0):
    measured = []

    def measure(segments, samples):
        measured.extend((segment, samples) for segment in segments)
        return [us(segment) for segment in segments]

    names = lambda segment: tuple(operators[i].name for i in segment)
    stage = StageOne(operators, names, predict, measure)
    scheme = stage.run(FusionScheme(start), max_moves)
    return scheme, stage.history, measured


def test_it_finds_the_best_scheme_of_a_small_graph():
    schemes = {FusionScheme("".join(digits)) for digits in product("01", repeat=len(CHAIN))}
    total = lambda scheme: sum(map(made_up_us, scheme.segments))
    best = min((s for s in schemes if is_legal(s, CHAIN)), key=total)
    for start in ("010101", "001011", "011110"):
        found, _, _ = search(start=start)
        assert total(found) == pytest.approx(total(best))


def test_what_is_slower_is_rolled_back():
    scheme, history, _ = search(us=lambda segment: 1.0 * len(segment) ** 2, start="010101")
    assert str(scheme) == "0 1 0 1 0 1"
    assert history and not any(step.kept for step in history)


def test_the_history_says_what_was_compared():
    _, history, _ = search(start="010101")
    assert any(step.kept for step in history)
    for step in history:
        assert step.kept == (step.after_us < 0.99 * step.before_us)
        assert step.move in ("expand", "seize", "compete") and step.scheme.startswith("0x")


def test_it_is_bounded():
    _, history, _ = search(start="010101", max_moves=2)
    assert len(history) == 2


def test_it_ends_when_told():
    stage = StageOne(
        CHAIN, lambda segment: segment, lambda segment: 1.0, lambda segments, samples: [1.0] * len(segments)
    )
    assert stage.run(FusionScheme("010101"), 100, is_over=lambda: True) == FusionScheme("010101")
    assert stage.history == []


def test_equal_layers_are_measured_once_and_stay_equal():
    layers = tuple(Operator(op.name, op.kind, (i - 1,) if i else ()) for i, op in enumerate([*CHAIN, *CHAIN, *CHAIN]))
    us = lambda segment: 5.0 + sum(100.0 * (layers[i].kind == CI and i > segment.start) for i in segment)
    scheme, history, _ = search(us, layers, "010101" * 3)
    one, one_history, _ = search(us, CHAIN, "010101")
    assert str(scheme).split()[:1] == str(one).split()[:1]
    lengths = [len(segment) for segment in scheme.segments]
    assert lengths == lengths[:2] * 3
    assert len(history) <= 3 * len(one_history)


def test_hopeless_moves_are_not_measured():
    _, history, measured = search(start="000111", predict=lambda segment: 1000.0 if len(segment) > 3 else 1.0)
    assert all(len(segment) <= 3 for segment, _ in measured)


def test_what_one_setting_shows_to_lose_gets_no_more():
    """Segments of three or more operators take three times as long here; they are measured in one setting."""
    scheme, history, measured = search(us=lambda segment: 3.0 ** (len(segment) > 2) * len(segment), start="010101")
    assert str(scheme) == "0 1 0 1 0 1" and not any(step.kept for step in history)
    assert all(len(segment) <= 2 for segment, samples in measured if samples > 1)
    assert any(len(segment) == 2 for segment, samples in measured if samples > 1)


def test_a_segment_that_cannot_run_is_not_taken():
    scheme, history, _ = search(us=lambda segment: None if len(segment) > 1 else 100.0, start="010101")
    assert str(scheme) == "0 1 0 1 0 1" and history == []


def test_changed_segments():
    old, new = changed(FusionScheme("001100"), FusionScheme("000100"))
    assert old == [range(0, 2), range(2, 4)] and new == [range(0, 3), range(3, 4)]
