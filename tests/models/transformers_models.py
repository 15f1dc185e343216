"""Small Hugging Face models from configurations, nothing downloaded: model and inputs by name."""

import torch

NAMES = ("bert", "gpt2", "llama", "t5", "vit")


def transformers_model(name: str, attention: str) -> torch.nn.Module:
    """A seeded model; `attention` is transformers' attn_implementation, "sdpa" or "eager"."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    common = {"attn_implementation": attention, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=64, attn_implementation=attention)
        return transformers.BertModel(config).eval()
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=4, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2, **common)
        return transformers.LlamaForCausalLM(config).eval()
    if name == "t5":
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0, **common)
        return transformers.T5ForConditionalGeneration(config).eval()
    del sizes["vocab_size"]
    config = transformers.ViTConfig(
        **sizes, intermediate_size=64, image_size=16, patch_size=4, attn_implementation=attention
    )
    return transformers.ViTModel(config).eval()


def transformers_inputs(name: str, padded: bool, batch: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Keyword inputs; `padded` adds an attention_mask that leaves out the end of the last sequence."""
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    ids = torch.randint(0, 64, (batch, length), generator=generator)
    inputs = {"input_ids": ids}
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, : length // 2]
    if padded:
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        inputs["attention_mask"][-1, length // 2 :] = 0
    return inputs
