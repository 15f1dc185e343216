"""Prompts of a batch in parts: what follows them is what follows all at once, and which are not divided."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stof_tvm import masks
from stof_tvm.errors import VerificationError
from stof_tvm.generation import engines, parts
from stof_tvm.generation.decoder import Decoder
from stof_tvm.generation.generator import Sizes
from stof_tvm.generation.parts import in_parts
from stof_tvm.generation.proof import prove_decoder
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import ONE_LAYER, VOCABULARY, small, tokens

LENGTH, BATCH, PART = 64, 3, 2
SHORT, LONG = 16, 32  # prompts of the one are computed at once, of the other for two sequences at a time


def made(mask=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST_TOKENS", PART * LONG)
        sizes = dict(max_length=LENGTH, batch=BATCH, prompt=(SHORT, LONG))
        return engines(small("qwen3"), **sizes, target=QUICK_LLVM, mask=mask)


@pytest.fixture(scope="module")
def in_twos():
    return made()


def padding(*lengths: int) -> torch.Tensor:
    """For prompts of these lengths, padded on the left to the longest."""
    return (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()


def test_parts_follow_one_another_and_the_last_one_overlaps():
    calls = []

    def call(ids, lengths, first):
        calls.append((int(first), len(ids), len(lengths)))
        logits.copy_(ids[:, :1] * 10.0 + lengths[:, None])  # an output that is used again
        return logits

    logits, ids, lengths = torch.empty(2, 1), torch.arange(5)[:, None].expand(5, 4), torch.arange(5)
    assert torch.equal(in_parts(call, ids, lengths, 2), torch.arange(5.0)[:, None] * 11)
    assert calls == [(0, 2, 2), (2, 2, 2), (3, 2, 2)]
    logits = torch.empty(5, 1)
    assert in_parts(call, ids, lengths, 5) is logits and calls[3:] == [(0, 5, 5)]


def test_sequences_of_a_part():
    sizes = Sizes(1 << 17, 16, 96, (64, 4096, 4097, 32704, 1 << 17), False, parts.MOST_TOKENS)
    assert [sizes.part_of(room) for room in sizes.buckets] == [16, 16, 15, 2, 1]
    assert sizes.has_parts and not Sizes(1 << 17, 16, 96, sizes.buckets, False).has_parts
    assert not Sizes(4096, 16, 96, (64, 4096), False, parts.MOST_TOKENS).has_parts
    assert not Sizes(1 << 17, 1, 96, sizes.buckets, False, parts.MOST_TOKENS).has_parts


@pytest.mark.parametrize("lengths", [(27, 20, 24), (17, 32, 1), (30, 30, 30), (5, 16, 9)])
def test_tokens_are_those_of_transformers(in_twos, lengths):
    """Also of the sequence that is computed twice, and of prompts in a cache that longer ones had."""
    ids, mask = tokens(BATCH, max(lengths), seed=sum(lengths)), padding(*lengths)
    expected = small("qwen3").generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert torch.equal(in_twos.generate(ids, mask, max_new_tokens=24, do_sample=False), expected)


@torch.no_grad()
def test_logits_are_those_of_the_texts_alone(in_twos):
    ids, lengths = tokens(BATCH, 29), (22, 29, 25)
    with in_twos.turn():
        logits = in_twos.prompt(ids, padding(*lengths))
        token = logits.argmax(-1, keepdim=True)
        found = torch.stack([logits, in_twos.step(token)])
    for n, length in enumerate(lengths):
        text = torch.cat([ids[n : n + 1, 29 - length :], token[n : n + 1]], 1)
        torch.testing.assert_close(found[:, n], small("qwen3")(text).logits[0, -2:], atol=1e-4, rtol=1e-4)


def test_engines_are_for_a_part_and_write_in_place(in_twos):
    for room, count in ((SHORT, BATCH), (LONG, PART)):
        engine = in_twos._prompt_engine(room)
        assert engine.signature.inputs[0].shape == (count, room)
        assert all(state.result is None for state in engine.signature.states if state.name != "positions")
        assert engine.report().verification.result == "passed" and not engine.report().notes
    assert len(in_twos.report().engines) == 3


def test_with_a_mask_all_sequences_are_at_one_position():
    mask, ids = masks.a_shape(2, 6), tokens(BATCH, 27)
    found = made(mask)
    assert found.sizes.is_of_one_length and found._prompt_engine(LONG).signature.inputs[0].shape == (PART, LONG)
    at_once = engines(small("qwen3"), max_length=LENGTH, batch=BATCH, prompt=LONG, target=QUICK_LLVM, mask=mask)
    assert at_once._prompt_engine(LONG).signature.inputs[0].shape == (BATCH, LONG)
    expected = at_once.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(found.generate(ids, max_new_tokens=24, do_sample=False), expected)


def test_prompts_with_masks_of_their_own_are_not_divided():
    """The second part would have the masks of the first sequences."""
    own, ids = [masks.sliding_window(n) for n in (2, 9, 20)], tokens(BATCH, 27)
    mask = torch.stack([x.dense(LENGTH) for x in own])[:, None]
    found = made(mask)
    assert not found.sizes.has_parts and found._prompt_engine(LONG).signature.inputs[0].shape == (BATCH, LONG)
    by_path = made({"model.layers.0": mask})
    assert not by_path.sizes.has_parts
    logits = found.prompt(ids)
    assert torch.equal(by_path.prompt(ids), logits)
    keep = mask[:, :, :27, :27] & torch.ones(27, 27).tril().bool()
    with torch.no_grad():
        expected = small("qwen3")(ids, attention_mask=keep, use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


class TellsApart(LlamaForCausalLM):
    """Each sequence of a batch has features of its own."""

    def forward(self, input_ids, **arguments):
        shifts = torch.arange(len(input_ids), device=input_ids.device).view(-1, 1, 1)
        return super().forward(None, inputs_embeds=self.model.embed_tokens(input_ids) + shifts, **arguments)


def test_a_model_that_tells_sequences_apart_is_refused_where_they_are_divided():
    """A part of them would be other sequences to it."""
    torch.manual_seed(0)
    shape = BATCH, ONE_LAYER["num_key_value_heads"], LENGTH, ONE_LAYER["head_dim"]
    decoder = Decoder(TellsApart(LlamaConfig(**ONE_LAYER)).eval(), [(shape, shape)], torch.float32, one_position=False)
    sizes = Sizes(LENGTH, BATCH, VOCABULARY, (SHORT, LONG), False, most_tokens=None)
    prove_decoder(decoder, sizes)
    with pytest.raises(VerificationError, match="TellsApart computes other logits"):
        prove_decoder(decoder, replace(sizes, most_tokens=PART * LONG))
