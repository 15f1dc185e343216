"""What a call of `generate` may ask for: transformers' own options, streamers, processors and criteria."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from stof_tvm.errors import InputError, UnsupportedError
from tests.stof_tvm.generation.conftest import small, tokens


def both(two, ids, seed=0, **options):
    """What transformers and engines generate."""
    results = []
    for generate in (small("llama").generate, two.generate):
        torch.manual_seed(seed)
        results.append(generate(ids, **options))
    return results


class Collected:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got, self.has_ended = [], False

    def put(self, value):
        self.got.append(value)

    def end(self):
        self.has_ended = True


def test_a_streamer_gets_prompt_and_tokens(two):
    streamer, ids = Collected(), tokens(2, 6)
    found = two.generate(ids, max_new_tokens=5, do_sample=False, streamer=streamer)
    assert streamer.has_ended and torch.equal(streamer.got[0], ids)
    assert torch.equal(torch.stack(streamer.got[1:], 1), found[:, 6:]) and len(streamer.got) == 6


def test_sequences_end_at_eos_and_are_padded(two):
    """One ends earlier than the other; then both have, and nothing more is computed."""
    ids = tokens(2, 6)
    free = two.generate(ids, max_new_tokens=40, do_sample=False)[:, 6:]
    first = next(n for n in range(1, 20) if int(free[0, n]) not in free[1].tolist())
    last = next(n for n in range(first + 2, 40) if int(free[1, n]) not in [*free[0].tolist(), *free[1, :n].tolist()])
    ends = [int(free[0, first]), int(free[1, last])]
    expected, found = both(two, ids, max_new_tokens=40, do_sample=False, eos_token_id=ends, pad_token_id=95)
    assert torch.equal(found, expected) and found.shape[1] == 6 + last + 1
    assert found[0, 6 + last] == 95


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True),
        dict(do_sample=True, temperature=0.7, top_k=12, top_p=0.9),
        dict(do_sample=True, num_return_sequences=2),
        dict(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2),
        dict(do_sample=False, min_new_tokens=5, eos_token_id=list(range(0, 90)), pad_token_id=0),
        dict(do_sample=True, watermarking_config=WatermarkingConfig(bias=3.0)),
        dict(generation_config=GenerationConfig(do_sample=True, top_k=5, max_new_tokens=9)),
    ],
    ids=["sample", "warped", "several", "penalties", "least", "watermark", "config"],
)
def test_options_of_transformers(two, options):
    count = 2 // options.get("num_return_sequences", 1)
    length = {} if "generation_config" in options else {"max_new_tokens": 24}
    expected, found = both(two, tokens(count, 7), seed=3, **options, **length)
    assert torch.equal(found, expected)


def test_processors_and_criteria(two):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[0] == scores.shape[0] and scores.dtype == torch.float32
            return scores.masked_fill(torch.arange(scores.shape[1]) != input_ids.shape[1], float("-inf"))

    class Until(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return input_ids[:, -1] == 15

    options = dict(logits_processor=[Only()], stopping_criteria=StoppingCriteriaList([Until()]))
    found = two.generate(tokens(2, 10), max_new_tokens=20, do_sample=False, **options)
    assert found[0, 10:].tolist() == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(num_beams=2), "generate chooses tokens greedily or by sampling, not by beam_search"),
        (dict(return_dict_in_generate=True), "generate returns tokens only: leave return_dict_in_generate out"),
        (dict(position_ids=tokens(2, 4)), "generate does not take position_ids"),
    ],
)
def test_what_is_not_supported(two, options, error):
    with pytest.raises(UnsupportedError, match=error):
        two.generate(tokens(2, 4), max_new_tokens=2, **options)


def test_a_misspelled_option_is_refused(two):
    with pytest.raises(ValueError, match="max_tokens"):
        two.generate(tokens(2, 4), max_tokens=2)


@pytest.mark.parametrize("most", [8, 12, 3])
def test_a_criterion_of_a_length_takes_the_place_of_the_configurations(two, most):
    for options in ({}, {"eos_token_id": 95, "pad_token_id": 95}):
        criteria = StoppingCriteriaList([MaxLengthCriteria(most)])
        options |= dict(max_new_tokens=5, do_sample=False, stopping_criteria=criteria)
        expected, found = both(two, tokens(2, 5), **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("attention_mask", [None, [[1] * 7] * 2, [[0, 0, 1, 1, 1, 1, 1], [1] * 7]], ids=str)
@pytest.mark.parametrize("has_padding", [False, True])
def test_a_prompt_that_is_begun_before_the_options_are_known(two, attention_mask, has_padding, monkeypatch):
    """As on GPUs; where transformers takes some of its tokens for padding, it is computed again."""
    monkeypatch.setattr(two, "runs_beside", True)
    ids, begun = tokens(2, 7), []
    if has_padding:
        ids[0, :2] = 0  # the token of padding
    monkeypatch.setattr(two, "begin", lambda *given: begun.append(1) or type(two).begin(two, *given))
    given = {} if attention_mask is None else {"attention_mask": torch.tensor(attention_mask)}
    expected, found = both(two, ids, max_new_tokens=9, do_sample=False, **given)
    assert torch.equal(found, expected)
    assert len(begun) == (2 if has_padding and attention_mask is None else 1)
    with pytest.raises(InputError, match="prompt and new tokens are"):
        two.generate(ids, max_new_tokens=10_000)
    with pytest.raises(InputError, match="there are 4"):
        two.generate(ids, max_new_tokens=2, do_sample=True, num_return_sequences=2)
    assert torch.equal(two.generate(ids, max_new_tokens=9, do_sample=False, **given), expected)


def test_steps_are_launched_before_tokens_are_read(two, monkeypatch):
    """As on GPUs: tokens, what a streamer gets, and where the engines are afterwards stay the same."""
    ids = tokens(2, 6)
    free = two.generate(ids, max_new_tokens=30, do_sample=False)[:, 6:]
    end = next(int(x) for x in free[0, 3:] if int(x) in free[1].tolist())  # both come to it, if not at once
    for options in ({"eos_token_id": end, "pad_token_id": 95}, {"max_new_tokens": 5}, {"eos_token_id": 94}):
        options = {"max_new_tokens": 30, "do_sample": False, **options}
        found = []
        for is_ahead in (False, True):
            monkeypatch.setattr(two, "runs_beside", is_ahead)
            streamer = Collected()
            text = two.generate(ids, streamer=streamer, **options)
            found.append((text, streamer.got[1:], two._filled, two._step.state["positions"].clone()))
        (text, got, filled, places), (text2, got2, filled2, places2) = found
        assert torch.equal(text, text2) and torch.equal(torch.stack(got), torch.stack(got2)) and filled == filled2
        assert torch.equal(places, places2) and int(places[0]) == text.shape[1] - 1


def test_criteria_of_a_user_see_what_a_streamer_saw(two, monkeypatch):
    """They may read what the streamer does, so each token is streamed before they are asked about it."""
    monkeypatch.setattr(two, "runs_beside", True)
    streamer = Collected()

    class Seen(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((2,), len(streamer.got) == 4)  # the prompt, and three tokens

    found = two.generate(
        tokens(2, 6),
        max_new_tokens=20,
        do_sample=False,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([Seen()]),
    )
    assert found.shape[1] == 6 + 3
