"""The page of models, and two of them; `make zoo` builds all."""

import re
from pathlib import Path

import pytest

from tests.models.zoo import KNOWN, KWARGS, check, make

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_lists_every_model():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == list(KWARGS)
    assert all(f"| – | {why} |" in PAGE.read_text() for why in KNOWN.values())


@pytest.mark.slow
@pytest.mark.parametrize("name, sites", [("Phi3ForCausalLM", 1), ("SwinModel", 2)])
def test_one_of_each_kind(name, sites):
    """What is left of a head without rotary positions is empty; windows of images that are rolled."""
    _, sparse, _, wrong = check(name)
    assert (sparse, wrong) == (sites, "")


def test_models_are_the_same_every_time():
    (one, inputs), (other, _) = make("BertForMaskedLM"), make("BertForMaskedLM")
    assert all((a == b).all() for a, b in zip(one.state_dict().values(), other.state_dict().values()))
    assert inputs["input_ids"].shape == (2, 16)
