"""The page of models, and two of them; `make zoo` builds all."""

import re
from pathlib import Path

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from tests.models.diffusers_models import make_diffusers
from tests.models.zoo import ALL, KNOWN, check, make

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_lists_every_model():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == ALL
    assert all(f"| – | {why} |" in PAGE.read_text() for why in KNOWN.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, sites", [("Phi3ForCausalLM", 1), ("Gemma2ForCausalLM", 1), ("SwinModel", 2), ("DeepseekV3ForCausalLM", 1)]
)
def test_one_of_each_kind(name, sites):
    """A head without what has rotary positions is empty; scores are capped; windows of images are rolled; experts."""
    _, sparse, _, wrong = check(name)
    assert (sparse, wrong) == (sites, "")


@pytest.mark.slow
@pytest.mark.parametrize("name, sites", [("PixArtTransformer2DModel", 2), ("ChromaTransformer2DModel", 2)])
def test_models_of_diffusers(name, sites):
    """A text is padded; a mask of queries and keys is known at run time only."""
    pytest.importorskip("diffusers")
    _, sparse, _, wrong = check(name)
    assert (sparse, wrong) == (sites, "")


@pytest.mark.slow
def test_a_mask_reaches_the_attention_of_diffusers_and_engines_are_saved(tmp_path):
    pytest.importorskip("diffusers")
    model, inputs = make_diffusers("WanTransformer3DModel")
    path = "blocks.*.attn1"
    engine = stof_tvm.build(model, "llvm", inputs, {path: masks.sliding_window(3)}, strict=True, tuning_logs=False)
    assert {site.site: site.density < 0.5 for site in engine.report().sites} == {
        "blocks.0.attn1": True,
        "blocks.0.attn2": False,
    }
    engine.save(tmp_path / "wan.stof")
    args = inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"]
    (sample,) = stof_tvm.load(tmp_path / "wan.stof")(*args).to_tuple()
    torch.testing.assert_close(sample, engine(**inputs).sample, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_one_token(name):
    _, _, _, wrong = check(name, one=True)
    assert wrong == ""


class Ones(torch.nn.Module):
    """One sequence, one token, one key, one head, one column, one class."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.narrow = torch.nn.TransformerEncoderLayer(1, 1, 1, batch_first=True)
        self.cross = torch.nn.MultiheadAttention(16, 1, batch_first=True)
        self.classes = torch.nn.Sequential(torch.nn.Linear(16, 1), torch.nn.LayerNorm(1), torch.nn.Softmax(-1))
        self.table = torch.nn.Embedding(1, 16)

    def forward(self, x, queries, ids):
        y = self.layer(x)
        crossed, _ = self.cross(queries, y, y)
        rows = self.table(ids) + y
        return y, crossed, self.narrow(x[..., :1]), self.classes(y), rows, y.amax(-1), rows.argmax(-1), y.sum()


@pytest.mark.slow
def test_every_length_is_one():
    torch.manual_seed(0)
    model, ids = Ones().eval(), torch.zeros(1, 1, dtype=torch.int64)
    inputs = torch.randn(1, 1, 16), torch.randn(1, 5, 16), ids
    engine = stof_tvm.build(model, "llvm", inputs, tuning_logs=False)
    with torch.no_grad():
        torch.testing.assert_close(engine(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_models_are_the_same_every_time():
    (one, inputs), (other, _) = make("BertForMaskedLM"), make("BertForMaskedLM")
    assert all((a == b).all() for a, b in zip(one.state_dict().values(), other.state_dict().values()))
    assert inputs["input_ids"].shape == (2, 16)
