"""The collector's thresholds while a model is compiled, and after it."""

import gc

import pytest

from relax_passes.collected_seldom import NEW_OBJECTS, collected_seldom


@pytest.fixture(params=[(700, 10, 10), (0, 10, 10), (NEW_OBJECTS * 2, 5, 3)])
def thresholds(request):
    before = gc.get_threshold()
    gc.set_threshold(*request.param)
    yield request.param
    gc.set_threshold(*before)


def test_thresholds_are_larger_within(thresholds):
    with collected_seldom(), collected_seldom():
        first, *others = gc.get_threshold()
        assert first == (max(thresholds[0], NEW_OBJECTS) if thresholds[0] else 0)
        assert others == list(gc.get_threshold()[1:]) == list(thresholds[1:])
    assert gc.get_threshold() == thresholds


def test_thresholds_are_what_they_were_after_an_error(thresholds):
    @collected_seldom()
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert gc.get_threshold() == thresholds


def test_contexts_of_threads_need_not_be_nested(thresholds):
    first, second = collected_seldom(), collected_seldom()
    first.__enter__()
    within = gc.get_threshold()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == within
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
