"""Engines in pipelines of transformers answer as the model does."""

import numpy as np
import pytest
import torch
from torch.export import Dim

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import stof_tvm  # noqa: E402
from stof_tvm.errors import InputError, UnsupportedError  # noqa: E402
from stof_tvm.transformers import as_model  # noqa: E402
from tests.models.quick_llvm import QUICK_LLVM  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
TEXTS = ["w7 w8 w9", "w10 w11 w12 w13 w14", "w20"]
LABELS = {0: "dull", 1: "fair", 2: "bright"}


@pytest.fixture(scope="module")
def tokenizer():
    special = {"w0": "pad_token", "w1": "unk_token", "w2": "mask_token"}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = {name: token for token, name in special.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, **named, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )


def made(kind: str):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=32, id2label=LABELS, pad_token_id=0)
    return getattr(transformers, kind)(config).eval()


def range_of(model, tokenizer, names=("input_ids", "token_type_ids", "attention_mask")):
    """An engine for batches of texts of any length."""
    dims = {0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=16)}
    example = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    example = {name: example[name] for name in names}
    shapes = dict.fromkeys(example, dims)
    return stof_tvm.build(model, QUICK_LLVM, example, dynamic_shapes=shapes, lazy=True, verify=False)


@pytest.fixture(scope="module")
def classifier():
    return made("BertForSequenceClassification")


@pytest.fixture(scope="module")
def engine(classifier, tokenizer):
    return range_of(classifier, tokenizer)


def numbers(answer):
    """Answers without their scores and other floats, and these as a tensor."""
    if isinstance(answer, dict):
        parts = [(name, numbers(answer[name])) for name in sorted(answer)]
        return [(name, told) for name, (told, _) in parts], [x for _, (_, found) in parts for x in found]
    if isinstance(answer, list | tuple):
        parts = [numbers(one) for one in answer]
        return [told for told, _ in parts], [x for _, found in parts for x in found]
    return (None, [float(answer)]) if isinstance(answer, float | np.floating) else (answer, [])


def same(ours, theirs):
    (told, found), (expected, floats) = numbers(ours), numbers(theirs)
    assert told == expected and floats
    torch.testing.assert_close(torch.tensor(found), torch.tensor(floats), atol=2e-5, rtol=1e-4)


def answers(task, model, tokenizer, texts=TEXTS, **options):
    # A warning of transformers that a model is not of the task would be logged, not raised.
    pipe = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **options)
    return pipe(texts)


def test_text_classification(engine, classifier, tokenizer, caplog):
    """One text after another, and padded together; labels are those of the configuration."""
    adapter = as_model(engine, classifier)
    for options in ({}, {"batch_size": 3}, {"top_k": None}):
        ours = answers("text-classification", adapter, tokenizer, **options)
        same(ours, answers("text-classification", classifier, tokenizer, **options))
    assert all(one["label"] in LABELS.values() for one in answers("text-classification", adapter, tokenizer))
    assert "is not supported" not in caplog.text
    assert type(adapter).__name__ == "BertForSequenceClassification" and adapter.device == torch.device("cpu")


def test_batches_without_padding(classifier, tokenizer):
    example = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    packed = stof_tvm.build(classifier, QUICK_LLVM, example, without_padding=True)
    ours = answers("text-classification", as_model(packed, classifier), tokenizer, batch_size=3, top_k=None)
    same(ours, answers("text-classification", classifier, tokenizer, batch_size=3, top_k=None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("feature-extraction", "BertModel"),
        ("fill-mask", "BertForMaskedLM"),
        ("token-classification", "BertForTokenClassification"),
    ],
)
def test_other_tasks(task, kind, tokenizer):
    model = made(kind)
    texts = ["w7 w2 w9"]
    adapter = as_model(range_of(model, tokenizer), model)
    same(answers(task, adapter, tokenizer, texts), answers(task, model, tokenizer, texts))


@pytest.mark.slow
def test_a_saved_engine_of_one_shape_with_a_configuration(classifier, tokenizer, tmp_path):
    """Texts are padded to the shape; the configuration's architecture names the class."""
    example = tokenizer(["w3 w4"], padding="max_length", max_length=8, return_tensors="pt")
    stof_tvm.build(classifier, QUICK_LLVM, dict(example), verify=False).save(tmp_path / "engine.stof")
    config = classifier.config
    config.architectures = ["BertForSequenceClassification"]
    adapter = as_model(stof_tvm.load(tmp_path / "engine.stof"), config)
    padded = dict(padding="max_length", max_length=8, truncation=True)
    ours = answers("text-classification", adapter, tokenizer, **padded)
    same(ours, answers("text-classification", classifier, tokenizer, **padded))
    with pytest.raises(InputError, match=r"input_ids must be an int64 tensor of shape \(1, 8\)"):
        answers("text-classification", adapter, tokenizer)


@pytest.fixture
def counted():
    """An adapter of an engine of given arguments, and the arguments of its calls."""

    class Counted(stof_tvm.Engine):
        argument_names = ()

        def __init__(self, names):
            object.__setattr__(self, "argument_names", names)
            object.__setattr__(self, "calls", [])

        def __call__(self, **kwargs):
            self.calls.append(kwargs)

        device = torch.device("cpu")

    def make(*names):
        engine = Counted(names)
        return as_model(engine, transformers.BertConfig(**SIZES)), engine.calls

    return make


def test_what_an_engine_lacks_may_be_given_if_it_changes_nothing(counted):
    model, calls = counted("input_ids")
    ids = torch.ones(2, 3, dtype=torch.int64)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=0 * ids, use_cache=False, labels=None)
    assert calls[0].keys() == {"input_ids"}
    mask = torch.ones_like(ids)
    mask[1, 2] = 0
    for wrong in (
        {"attention_mask": mask},
        {"token_type_ids": ids},
        {"use_cache": True},
        {"pixel_values": ids.float()},
    ):
        with pytest.raises(InputError, match=f"was built without {next(iter(wrong))}"):
            model(input_ids=ids, **wrong)
    assert len(calls) == 1


def test_what_is_not_given_is_what_a_model_would_take(counted):
    model, calls = counted("input_ids", "attention_mask", "token_type_ids")
    ids = torch.full((2, 3), 7)
    model(input_ids=ids)
    assert calls[0]["attention_mask"].tolist() == [[1] * 3] * 2 and calls[0]["token_type_ids"].tolist() == [[0] * 3] * 2
    with pytest.raises(InputError, match="needs attention_mask"):
        model()


def test_an_engine_stays_where_it_is_and_does_not_generate(counted):
    model, _ = counted("input_ids")
    assert model.to("cpu") is model.to("cpu:0") is model.eval() is model and not model.can_generate()
    with pytest.raises(InputError, match="the engine runs on cpu, not on cuda:0: pass device='cpu'"):
        model.to(0)
    with pytest.raises(UnsupportedError, match="does not generate"):
        model.generate()


def test_other_arguments_are_refused(engine):
    with pytest.raises(InputError, match="takes an Engine, got a int"):
        as_model(3, transformers.BertConfig())
    with pytest.raises(InputError, match="or its configuration, got a str"):
        as_model(engine, "bert")
