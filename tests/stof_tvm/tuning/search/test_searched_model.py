"""The sum of a model's times, with alternatives of which the fastest counts."""

from stof_tvm.tuning.search.searched_model import KernelChoice, SearchedModel


def test_the_fastest_alternative_counts():
    model = SearchedModel(
        (*SearchedModel.of([("a", 2)]).choices, KernelChoice(((("whole", 1),), (("first", 1), ("rest", 1)))))
    )
    assert model.kernels == [("a", 2), ("whole", 1), ("first", 1), ("rest", 1)]
    assert model.us({"a": 1.5, "whole": 9.0, "first": 2.0, "rest": 3.0}.get) == 3.0 + 5.0
    assert model.us({"a": 1.5, "whole": 9.0, "first": 2.0}.get) == 3.0 + 9.0
    assert model.us({"a": 1.5, "first": 2.0}.get) is None and model.us({"whole": 9.0}.get) is None
