"""Every architecture of transformers and diffusers that is to build: from a configuration, against PyTorch on this CPU.

    python -m tests.models.zoo [Swin …]                   # those whose names begin so
    python -m tests.models.zoo --one                      # those of transformers with one sequence of one token
    python -m tests.models.zoo --write docs/models.md     # all of them, and the page

Exit status 1 where one does not build or is wrong, and is not in `KNOWN`.
"""

import argparse
import functools
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from tests.models.diffusers_models import MODELS as DIFFUSERS
from tests.models.diffusers_models import make_diffusers

TOLERANCE = 2e-5


def without(sizes: dict, name: str) -> dict:
    return {key: value for key, value in sizes.items() if key != name}


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 64}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
DECODER = {**WIDE, **TOKENS, "num_key_value_heads": 2, "use_cache": False, "max_position_embeddings": 64}
GPT = {"vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "use_cache": False, **TOKENS}
SIDES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
FEED_FORWARD = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART = {"vocab_size": 64, "d_model": 32, **SIDES, **FEED_FORWARD, "use_cache": False, **TOKENS}
BART |= {"decoder_start_token_id": 0, "max_position_embeddings": 64}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, **TOKENS}
IMAGES = {**without(WIDE, "vocab_size"), "image_size": 16, "patch_size": 4}
SPEECH = {
    **without(WIDE, "vocab_size"),
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
}
SPEECH |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
EXPERTS = {**DECODER, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Experts in groups of which some are chosen first; keys and values from a latent vector.
GROUPED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
GROUPED |= {"first_k_dense_replace": 0}
LATENT = {**GROUPED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8}

MODELS = {
    "encoders": {
        "BertForMaskedLM": WIDE,
        "BertForSequenceClassification": WIDE,
        "RobertaModel": {**WIDE, "max_position_embeddings": 64},
        "XLMRobertaForSequenceClassification": {**WIDE, "max_position_embeddings": 64},
        "CamembertForTokenClassification": WIDE,
        "DistilBertModel": {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64},
        "AlbertModel": {**WIDE, "embedding_size": 16},
        "ElectraModel": {**WIDE, "embedding_size": 16},
        "MPNetModel": WIDE,
        "EsmModel": {**WIDE, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
        "ModernBertForMaskedLM": {**WIDE, **TOKENS},
        "DebertaModel": WIDE,
        "DebertaV2Model": WIDE,
        "BigBirdModel": {**WIDE, "attention_type": "original_full"},
        "LongformerModel": {**WIDE, "attention_window": 4},
        "XLNetModel": {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64},
        "SqueezeBertModel": {**WIDE, "embedding_size": 32},
        "T5EncoderModel": T5,
        "UMT5EncoderModel": T5,
        "CLIPTextModel": {**WIDE, **TOKENS, "max_position_embeddings": 64},
    },
    "decoders": {
        "GPT2LMHeadModel": GPT,
        "GPTBigCodeForCausalLM": GPT,
        "GPTJModel": {**GPT, "rotary_dim": 4},
        "CodeGenModel": {**GPT, "rotary_dim": 4},
        "GPTNeoXForCausalLM": {**WIDE, **TOKENS, "use_cache": False},
        "GPTNeoModel": {
            **{"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "use_cache": False},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
        },
        "OPTForCausalLM": {**SIZES, **TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False},
        "BloomModel": {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4, "use_cache": False, **TOKENS},
        "FalconModel": {**SIZES, **TOKENS, "use_cache": False},
        "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "use_cache": False},
        "LlamaForCausalLM": DECODER,
        "MistralModel": {**DECODER, "sliding_window": 4},
        "Qwen2ForCausalLM": DECODER,
        "Qwen3ForCausalLM": {**DECODER, "head_dim": 8},
        "PhiForCausalLM": DECODER,
        "Phi3ForCausalLM": DECODER,
        "GemmaForCausalLM": {**DECODER, "head_dim": 8},
        "Gemma2ForCausalLM": {**DECODER, "head_dim": 8, "sliding_window": 4},
        "Gemma3ForCausalLM": {**DECODER, "head_dim": 8, "sliding_window": 4},
        "StableLmForCausalLM": DECODER,
        "Starcoder2ForCausalLM": {**DECODER, "sliding_window": 4},
        "CohereForCausalLM": DECODER,
        "Olmo2ForCausalLM": DECODER,
        "GraniteForCausalLM": DECODER,
        "SmolLM3ForCausalLM": DECODER,
        "Glm4ForCausalLM": {**DECODER, "head_dim": 8},
    },
    "mixtures of experts": {
        "MixtralForCausalLM": EXPERTS,
        "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
        "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 8},
        "OlmoeForCausalLM": EXPERTS,
        "FlexOlmoForCausalLM": EXPERTS,
        "PhimoeForCausalLM": EXPERTS,
        "GraniteMoeForCausalLM": EXPERTS,
        "GraniteMoeSharedForCausalLM": EXPERTS,
        "GptOssForCausalLM": {**EXPERTS, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention"]},
        "DeepseekV2ForCausalLM": LATENT,
        "DeepseekV3ForCausalLM": LATENT,
        "Dots1ForCausalLM": {**GROUPED, "head_dim": 8},
        "Glm4MoeForCausalLM": {**GROUPED, "head_dim": 8},
        "Ernie4_5_MoeForCausalLM": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
        "HunYuanMoEV1ForCausalLM": {**EXPERTS, "head_dim": 8},
        "MiniMaxM2ForCausalLM": {**EXPERTS, "head_dim": 8},
        "Cohere2MoeForCausalLM": {**EXPERTS, "head_dim": 8, "layer_types": ["full_attention"]},
        "Lfm2MoeForCausalLM": {**EXPERTS, "layer_types": ["full_attention"], "num_dense_layers": 0},
        "AriaTextForCausalLM": EXPERTS,
    },
    "encoders with decoders": {
        "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0, "use_cache": False},
        "BartForConditionalGeneration": BART,
        "MBartModel": BART,
        "MarianModel": BART,
        "PegasusModel": BART,
        "M2M100Model": BART,
        "WhisperModel": {
            **without(BART, "max_position_embeddings"),
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        "LEDModel": {**without(BART, "max_position_embeddings"), "attention_window": 4},
    },
    "images and sound": {
        "ViTForImageClassification": IMAGES,
        "DeiTModel": IMAGES,
        "BeitModel": IMAGES,
        "Dinov2Model": without(IMAGES, "intermediate_size"),
        "SiglipVisionModel": IMAGES,
        "CLIPVisionModel": IMAGES,
        "YolosModel": {**IMAGES, "image_size": [16, 16], "num_detection_tokens": 4},
        "SwinModel": {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 2},
        "Swinv2Model": {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 2},
        "VivitModel": {**without(IMAGES, "patch_size"), "num_frames": 2, "tubelet_size": [1, 4, 4]},
        "ASTModel": {**IMAGES, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 16},
        "Wav2Vec2Model": SPEECH,
        "HubertModel": SPEECH,
    },
}
KWARGS = {name: kwargs for models in MODELS.values() for name, kwargs in models.items()}
ALL = [*KWARGS, *DIFFUSERS]
# Why it does not build, or builds with a dense attention.
KNOWN = {
    "Lumina2Transformer2DModel": "its lengths are the sums of its mask, and an engine's lengths are fixed",
    "MochiTransformer3DModel": "it leaves out the masked tokens, and an engine's lengths are fixed",
}


def make(name: str, one: bool = False, **options) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model by its class, seeded, in evaluation mode, and a call's inputs; `options` of its configuration.

    `one` is one sequence of one token, for models that take tokens, and one image for those that take images.
    """
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**KWARGS[name], **options)).eval()
    ids = torch.randint(0, 64, (2, 16))
    shapes = {
        "pixel_values": (1, 2, 3, 16, 16) if name == "VivitModel" else (2, 3, 16, 16),
        "input_features": (2, 8, 16),
        "input_values": (2, 16, 16) if name == "ASTModel" else (1, 64),
    }
    first = model.main_input_name
    inputs = {first: ids if first == "input_ids" else torch.randn(shapes[first])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :8]
    if one:
        inputs = {key: x[:1, :1] if x.dtype == torch.int64 else x[:1] for key, x in inputs.items()}
    return model, inputs


def check(name: str, one: bool = False) -> tuple[str, int, float, str]:
    """Name, number of sparse attentions, largest error, and what went wrong, as one line."""
    import stof_tvm

    warnings.simplefilter("ignore")
    try:
        model, inputs = make_diffusers(name) if name in DIFFUSERS else make(name, one)
        with torch.no_grad():
            expected = model(**inputs)
        engine = stof_tvm.build(model, "llvm", inputs, tuning_logs=False)
        got = engine(**inputs)
    except Exception as error:
        return name, 0, float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
    error = max(float((a.float() - b.float()).abs().max()) for a, b in pairs if isinstance(b, torch.Tensor))
    sites = engine.report().sites
    dense = [site.reason for site in sites if not site.rewritten]
    wrong = dense[0] if dense else "" if error < TOLERANCE else "wrong numbers"
    return name, len(sites) - len(dense), error, wrong


def page(results: dict[str, tuple[int, float, str]]) -> str:
    import diffusers
    import transformers

    rows = []
    for group, models in {**MODELS, "diffusers": DIFFUSERS}.items():
        rows += [f"\n## {group.capitalize()}\n", "| class | sparse attentions | largest error |", "|---|---|---|"]
        for name in models:
            sites, error, _ = results[name]
            cells = ("–", KNOWN[name]) if name in KNOWN else (sites, f"{error:.0e}")
            rows.append(f"| `{name}` | {cells[0]} | {cells[1]} |")
    return (
        "# Models of transformers and diffusers\n\n"
        f"Written by `python -m tests.models.zoo --write docs/models.md` with transformers {transformers.__version__} "
        f"and diffusers {diffusers.__version__}: each class from a configuration of one narrow layer (or one of each "
        "kind), random weights, built for this processor in float32, its outputs against PyTorch's. `KNOWN` there says "
        "what does not build.\n" + "\n".join(rows) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names (default: all)")
    parser.add_argument("--one", action="store_true", help="one sequence of one token")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write what was found to this page")
    options = parser.parse_args()
    if options.one and options.write:
        parser.error("--write: the page is of several tokens")
    names = [name for name in (KWARGS if options.one else ALL) if name.startswith(tuple(options.names))]
    results, started = {}, time.perf_counter()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for name, *result in pool.map(functools.partial(check, one=options.one), names):
            results[name] = result
            print(f"{name}: {result[0]} sparse, error {result[1]:.1e} {result[2]}", flush=True)
    wrong = [name for name in names if bool(results[name][2]) != (name in KNOWN)]
    print(f"{len(names)} models, {time.perf_counter() - started:.0f} s; unexpected: {', '.join(wrong) or 'none'}")
    if options.write and not wrong:
        options.write.write_text(page(results))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
