"""`stof_tvm.generate`: engines are made at the first call and used again."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

import stof_tvm
from stof_tvm.errors import InputError, UnsupportedError
from stof_tvm.generation import entry
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import small, tokens

SIZES = {"sizes": SimpleNamespace(max_length=256)}


@pytest.mark.slow
def test_engines_are_used_again_until_weights_change(monkeypatch):
    made = []

    def engines(model, **arguments):
        made.append(arguments)
        return actual(model, **arguments)

    actual = entry.engines
    monkeypatch.setattr(entry, "engines", engines)
    model = copy.deepcopy(small("gpt2"))

    def check(ids):
        options = dict(max_new_tokens=6, do_sample=False)
        assert torch.equal(stof_tvm.generate(model, ids, target=QUICK_LLVM, **options), model.generate(ids, **options))

    check(tokens(1, 8))
    check(tokens(1, 20, seed=1))
    assert [arguments["max_length"] for arguments in made] == [256]
    with torch.no_grad():
        model.transformer.wte.weight.mul_(-1)
    check(tokens(1, 8))
    assert len(made) == 2


def test_engines_of_another_current_gpu_are_others(monkeypatch):
    """A model on the CPU, engines on whichever GPU is current: ids on the one are for engines on that one."""
    checked, made = [], []
    monkeypatch.setattr(entry, "checked_ids", lambda ids, vocabulary, device: checked.append(str(device)))
    monkeypatch.setattr(entry, "engines", lambda model, **options: made.append(options) or SimpleNamespace(**SIZES))
    monkeypatch.setattr(entry, "generated", lambda ids, mask, config, vocabulary, generator_for, o: generator_for(1, 8))
    model = small("gpt2")
    found = []
    for gpu in (0, 1, 0):
        monkeypatch.setattr(entry, "current_device", lambda kind, gpu=gpu: torch.device(kind, gpu))
        found.append(stof_tvm.generate(model, tokens(1, 8), target="cuda -arch=sm_80"))
    assert checked == ["cuda:0", "cuda:1", "cuda:0"] and len(made) == 2
    assert found[0] is found[2] is not found[1]


def test_a_generator_is_called_as_it_is(two):
    ids = tokens(2, 5)
    found = stof_tvm.generate(two, ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, two.generate(ids, max_new_tokens=3, do_sample=False))
    given = stof_tvm.generate(two, **{"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=3)
    assert given.shape == found.shape
    for wrong in ({}, {"ids": ids, "input_ids": ids}):
        with pytest.raises(InputError, match="takes ids, or input_ids in their place"):
            stof_tvm.generate(two, **wrong)
    with pytest.raises(InputError, match="a Generator has its target and mask already"):
        stof_tvm.generate(two, ids, target="llvm")


def test_what_is_refused():
    ids = tokens(1, 5)
    with pytest.raises(UnsupportedError, match="takes a causal language model of transformers, got a Linear"):
        stof_tvm.generate(torch.nn.Linear(2, 2), ids)
    for encoder in (BertModel, BertForMaskedLM):
        model = encoder(BertConfig(vocab_size=64, hidden_size=8, num_attention_heads=1, num_hidden_layers=1))
        with pytest.raises(UnsupportedError, match=f"{encoder.__name__} gives no logits of tokens"):
            stof_tvm.generate(model, ids, max_new_tokens=3)
    with pytest.raises(InputError, match="prompt and new tokens are 289, and the model has 288 positions"):
        stof_tvm.generate(small("llama"), ids, target=QUICK_LLVM, max_new_tokens=284)
    with pytest.raises(InputError, match="ids must be an int64 tensor"):
        stof_tvm.generate(small("llama"), ids.float(), target=QUICK_LLVM)


def test_rooms():
    assert [entry._room(n, None) for n in (2, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]
    assert entry._room(300, 400) == 400
