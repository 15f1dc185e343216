"""Small decoders of transformers, whose attentions all have the shapes of one kernel, and a count of sparse calls."""

import pytest
import torch

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
GQA = dict(SIZES, num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=None, bos_token_id=None)
WINDOW = 5
LENGTH = 16


@pytest.fixture(autouse=True)
def forget_graphs():
    yield
    torch._dynamo.reset()


@pytest.fixture
def decoder():
    """A function from the name of a family to a seeded model, of attention "stof" unless it is told another."""
    import transformers

    import stof_tvm.transformers  # noqa: F401  registers "stof"

    extra = {
        "Llama": {},
        "Mistral": {"sliding_window": WINDOW},
        "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 0.25, "query_pre_attn_scalar": 16},
        "Qwen3": {},
        "GptOss": {
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }

    def make(family: str, attention: str = "stof", **more):
        torch.manual_seed(0)
        if family == "GPT2":
            sizes = dict(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=4)
            tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
            config = transformers.GPT2Config(**sizes, **tokens, attn_implementation=attention, **more)
        else:
            config = getattr(transformers, f"{family}Config")
            config = config(**{**GQA, **extra[family], **more}, attn_implementation=attention)
        model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "q_proj" in name or "k_proj" in name or "sinks" in name:
                    x.normal_()  # so that caps, sinks and masks matter
        return model

    return make


@pytest.fixture
def sparse_calls(monkeypatch):
    """The masks of the calls of `sparse_attention` that attentions of transformers made."""
    from stof_tvm.transformers import attention

    calls, real = [], attention.sparse_attention

    def counted(q, k, v, mask=None, **kwargs):
        calls.append(mask)
        return real(q, k, v, mask, **kwargs)

    monkeypatch.setattr(attention, "sparse_attention", counted)
    return calls


@pytest.fixture
def ids():
    """int64 (2, LENGTH): tokens, none of them padding."""
    return torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def padding(side: str | None) -> torch.Tensor:
    """int64 (2, LENGTH): the second sequence is padded on a side."""
    kept = torch.ones(2, LENGTH, dtype=torch.int64)
    if side is not None:
        kept[1, slice(0, 6) if side == "left" else slice(10, None)] = 0
    return kept


def by_eager(model, *args, **kwargs):
    """What a model computes with attention "eager"; it has "stof" afterwards."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(*args, **kwargs)[0]
    finally:
        model.set_attn_implementation("stof")
