"""A Generator: prompts of all lengths without another compilation, half precision, threads, and what it refuses."""

import copy
import threading

import pytest
import torch

from stof_tvm.errors import InputError, UnsupportedError
from stof_tvm.generation import engines
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import LENGTH, VOCABULARY, small, tokens


def count(found) -> int:
    """Engines so far."""
    return len(found.report().engines)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_prompts_around_the_buckets(two, length):
    """Nothing is compiled; padding of longer prompts before does not reach shorter ones."""
    before = count(two)
    assert before == 3
    ids = tokens(2, length, seed=length)
    expected = small("llama").generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(two.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert count(two) == before


def test_a_longer_prompt_than_the_last_bucket(two):
    with pytest.raises(InputError, match="a prompt has 33 tokens, and the longest that these engines take has 32"):
        two.generate(tokens(2, 33), max_new_tokens=8)
    padding = torch.ones(2, 40)
    padding[:, :10] = 0
    expected = small("llama").generate(tokens(2, 40), attention_mask=padding, max_new_tokens=4, do_sample=False)
    assert torch.equal(two.generate(tokens(2, 40), padding, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.slow
def test_more_than_256_steps_up_to_the_last_position(two):
    assert LENGTH - 30 > 256
    expected = small("llama").generate(tokens(2, 30), max_new_tokens=LENGTH - 30, do_sample=False)
    assert torch.equal(two.generate(tokens(2, 30), max_new_tokens=LENGTH - 30, do_sample=False), expected)
    with pytest.raises(InputError, match="prompt and new tokens are 289, and the engines hold max_length=288"):
        two.generate(tokens(2, 30), max_new_tokens=LENGTH - 29)


def test_a_loop_of_ones_own(two):
    """`prompt` and `step` are what `generate` calls."""
    ids, model = tokens(2, 12), small("llama")
    padding = torch.ones_like(ids)
    padding[1, :3] = 0
    with torch.no_grad(), two.turn():
        logits = two.prompt(ids, padding)
        torch.testing.assert_close(logits[:1], model(ids[:1]).logits[:, -1], atol=1e-4, rtol=1e-4)
        token = logits.argmax(-1, keepdim=True)
        text = torch.cat([ids[1:, 3:], token[1:]], 1)
        torch.testing.assert_close(two.step(token)[1:], model(text).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "ids, error",
    [
        (torch.zeros(2, 4), r"ids must be an int64 tensor of shape \(batch, tokens\), got torch.float32 \(2, 4\)"),
        ([[1, 2]], "got list"),
        (torch.zeros(4, dtype=torch.int64), r"got torch.int64 \(4,\)"),
        (torch.zeros(2, 0, dtype=torch.int64), r"got torch.int64 \(2, 0\)"),
        (torch.zeros(2, 4, dtype=torch.int64, device="meta"), "ids are on meta; the engines run on cpu:0"),
        (torch.full((2, 4), VOCABULARY), "ids must be from 0 to 95, the model's vocabulary; there is 96"),
        (torch.full((2, 4), -1), "there is -1"),
        (tokens(3, 4), "the engines are for 2 sequences, and there are 3"),
    ],
)
def test_wrong_ids(two, ids, error):
    with pytest.raises(InputError, match=error):
        two.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize(
    "padding, error",
    [
        ([[1, 1, 1], [1, 1, 0]], "attention_mask must be 0 on the left only"),
        ([[1, 0, 1], [1, 1, 1]], "attention_mask must be 0 on the left only"),
        ([[0, 0, 0], [1, 1, 1]], "attention_mask is 0 in a whole sequence"),
        ([[1, 1], [0, 1]], r"attention_mask must have the shape of ids, \(2, 3\), got \(2, 2\)"),
    ],
)
def test_other_padding_is_refused(two, padding, error):
    with pytest.raises(InputError, match=error):
        two.prompt(tokens(2, 3), torch.tensor(padding))


def test_padding_of_another_shape_is_refused_where_it_is_1_everywhere(two):
    for shape in ((2, 2), (1, 3), (3,)):
        with pytest.raises(InputError, match="attention_mask must have the shape of ids"):
            two.generate(tokens(2, 3), torch.ones(shape, dtype=torch.int64), max_new_tokens=2)


def test_a_full_cache_takes_no_token(two):
    """Its slots hold positions up to max_length - 1: one token more would be written nowhere."""
    with two.turn():
        two.prompt(tokens(2, 20), torch.tensor([[0] * 8 + [1] * 12, [1] * 20]))
        two._filled = two.sizes.max_length - 1
        two.step(tokens(2, 1))
        with pytest.raises(InputError, match="the engines hold max_length=288 tokens, and there are as many"):
            two.step(tokens(2, 1))


@pytest.mark.parametrize(
    "chosen, found",
    [
        (torch.ones(2, dtype=torch.int64), r"torch.int64 \(2,\)"),
        (torch.ones(1, 1, dtype=torch.int64), r"torch.int64 \(1, 1\)"),  # else broadcast to both sequences
        (torch.full((2, 1), 1.7), r"torch.float32 \(2, 1\)"),  # else cut to 1
        ([[1], [2]], "list"),
    ],
)
def test_tokens_of_a_step_are_one_for_each_sequence(two, chosen, found):
    with two.turn():
        two.prompt(tokens(2, 5))
        filled = two._filled
        with pytest.raises(InputError, match=rf"tokens must be an int64 tensor of shape \(2, 1\), .*got {found}"):
            two.step(chosen)
        assert two._filled == filled


def test_a_step_follows_a_prompt(two):
    two._filled = 0  # as after the build
    with pytest.raises(InputError, match=r"a text begins with its prompt: call prompt\(ids\) before step\(tokens\)"):
        two.step(tokens(2, 1))


def test_a_turn_inside_a_turn_is_an_error(two):
    """It would wait for itself: `generate` in a turn, or called by a streamer of another text."""
    told = []

    def run():
        with two.turn():
            for inner in (lambda: two.generate(tokens(2, 4), max_new_tokens=2), lambda: two.turn().__enter__()):
                with pytest.raises(InputError, match="this thread has a turn of the Generator already"):
                    inner()
                told.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert told == [True, True]
    assert two.generate(tokens(2, 4), max_new_tokens=2).shape == (2, 6)


def test_texts_of_threads_follow_one_another(two):
    prompts = [tokens(2, 6 + n, seed=n) for n in range(3)]
    expected = [two.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    found = [None] * 3

    def run(n):
        found[n] = two.generate(prompts[n], max_new_tokens=12, do_sample=False)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
@torch.no_grad()
def test_errors_in_half_precision_are_those_of_pytorch():
    """At most twice PyTorch's own error against float32, of a prompt and of tokens after it."""
    model, exact = copy.deepcopy(small("llama")).half(), copy.deepcopy(small("llama")).half().float()
    found = engines(model, max_length=64, prompt=16, target=QUICK_LLVM)
    text = tokens(1, 11)
    logits, worst = found.prompt(text), [0.0, 0.0]
    for token in [*tokens(1, 20, seed=1).split(1, 1), None]:
        reference = exact(text).logits[:, -1]
        for n, x in enumerate((logits, model(text).logits[:, -1])):
            worst[n] = max(worst[n], (x.float() - reference).abs().max().item())
        if token is not None:
            text = torch.cat([text, token], 1)
            logits = found.step(token)
    assert 0 < worst[0] <= 2 * worst[1]


def test_it_is_not_saved(two, tmp_path):
    with pytest.raises(UnsupportedError, match="a Generator cannot be saved as .*x.stof: it builds engines"):
        two.save(tmp_path / "x.stof")
    assert not (tmp_path / "x.stof").exists()


def test_its_name(two):
    assert repr(two) == "Generator(2 sequences of up to 288 tokens; on cpu)"
