"""The models of the zoo: transformers' and diffusers' classes with the sizes of a published checkpoint.

Sizes that are a class's defaults are not repeated.
"""

from dataclasses import dataclass, field

TOKENS, IMAGE, SPEECH, MEL, LATENTS = "tokens", "image", "speech", "mel", "latents"


@dataclass(frozen=True)
class ZooModel:
    """One architecture.

    Attributes
    ----------
    published : str
        The checkpoint whose sizes these are.
    kind : str
        The class in transformers; in diffusers if its input is LATENTS.
    shapes : tuple of (int, int)
        (batch, length): tokens of a text, pixels of an image's sides, seconds of speech, frames of a spectrogram or of
        a video.
    sizes : dict
        Arguments of the configuration.
    input : str
        TOKENS, IMAGE, SPEECH, MEL or LATENTS.
    names : tuple of str
        The arguments of the model that get the input.
    layers : tuple of str
        The arguments of the configuration that count layers.
    ids : (int, int)
        The least token id, and the first that is too large: without those of padding and masking.
    bins : int
        Frequencies of a spectrogram, before its frames in an input if `bins_first`.
    channels : int
        Channels of latents.
    text : (int, int)
        Tokens and width of the text's embedding beside latents.
    sides : tuple of int
        Height and width of a video's latents; empty for an image.
    tiny : dict
        Sizes for dry runs besides those of make.py.
    tiny_length : int
        The length for dry runs.
    """

    published: str
    kind: str
    shapes: tuple[tuple[int, int], ...]
    sizes: dict = field(default_factory=dict, hash=False)
    input: str = TOKENS
    names: tuple[str, ...] = ("input_ids",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    ids: tuple[int, int] = (3, 30000)
    bins: int = 0
    bins_first: bool = False
    channels: int = 0
    text: tuple[int, int] = (0, 0)
    sides: tuple[int, ...] = ()
    tiny: dict = field(default_factory=dict, hash=False)
    tiny_length: int = 32


def _sizes(hidden: int, layers: int, heads: int, intermediate: int, **more) -> dict:
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    return dict(zip(names, (hidden, layers, heads, intermediate), strict=True)) | more


def _sides(width: int, layers: int, heads: int, intermediate: int) -> dict:
    """Sizes of BART's encoder and decoder."""
    each = {"layers": layers, "attention_heads": heads, "ffn_dim": intermediate}
    return {"d_model": width} | {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in each.items()}


def _image(published: str, kind: str, shapes, sizes: dict, side: int = 64, **more) -> ZooModel:
    """A vision model; `side` is the pixels of an image's sides in dry runs."""
    tiny = {"image_size": side, **more.pop("tiny", {})}
    return ZooModel(
        published, kind, shapes, sizes, IMAGE, ("pixel_values",), tiny=tiny, tiny_length=side, **more
    )  # fmt: skip


TEXT = (1, 512), (8, 512)
DECODER = (1, 512), (4, 1024)
PICTURE = (1, 224), (16, 224)
PAIR = "input_ids", "decoder_input_ids"
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_position_embeddings": 512,
}
ESM2 = {
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
    "token_dropout": False,
    "max_position_embeddings": 1026,
}
OPT = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
GRANITE = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
NARROW = {"attention_head_dim": 16}
T5 = {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 2048, "feed_forward_proj": "gated-gelu"}

ENCODERS = (
    ZooModel("ModernBERT-base", "ModernBertModel", ((1, 1024), (8, 2048))),
    ZooModel("RoBERTa-base", "RobertaModel", TEXT, {"vocab_size": 50265, "max_position_embeddings": 514}),
    ZooModel("DistilBERT-base", "DistilBertModel", TEXT, layers=("n_layers",)),
    ZooModel("ALBERT-base", "AlbertModel", TEXT, _sizes(768, 12, 12, 3072)),
    ZooModel("MPNet-base", "MPNetModel", TEXT, {"vocab_size": 30527, "max_position_embeddings": 514}),
    ZooModel("DeBERTa-v3-base", "DebertaV2Model", ((1, 256), (8, 512)), _sizes(768, 12, 12, 3072) | DEBERTA_V3),
    ZooModel("ESM2-150M", "EsmModel", TEXT, _sizes(640, 30, 20, 2560) | ESM2, ids=(4, 24)),
)
DECODERS = (
    ZooModel("Qwen3-0.6B", "Qwen3Model", DECODER, _sizes(1024, 28, 16, 3072, num_key_value_heads=8, head_dim=128)),
    ZooModel("Qwen2.5-0.5B", "Qwen2Model", DECODER, _sizes(896, 24, 14, 4864, num_key_value_heads=2)),
    ZooModel(
        "Llama-3.2-1B",
        "LlamaModel",
        DECODER,
        _sizes(2048, 16, 32, 8192, num_key_value_heads=8, head_dim=64, vocab_size=128256),
    ),
    ZooModel(
        "Gemma-3-1B",
        "Gemma3TextModel",
        DECODER,
        _sizes(1152, 26, 4, 6912, num_key_value_heads=1, head_dim=256, sliding_window=512, vocab_size=262144),
    ),
    ZooModel("Gemma-2-2B", "Gemma2Model", DECODER, _sizes(2304, 26, 8, 9216, num_key_value_heads=4, head_dim=256)),
    ZooModel("OLMo-2-1B", "Olmo2Model", DECODER, _sizes(2048, 16, 16, 8192, vocab_size=100352)),
    ZooModel("SmolLM2-360M", "LlamaModel", DECODER, _sizes(960, 32, 15, 2560, num_key_value_heads=5, vocab_size=49152)),
    ZooModel("Phi-1.5", "PhiModel", DECODER, _sizes(2048, 24, 32, 8192, partial_rotary_factor=0.5)),
    ZooModel("Pythia-410M", "GPTNeoXModel", DECODER, _sizes(1024, 24, 16, 4096)),
    ZooModel("OPT-350M", "OPTModel", DECODER, OPT, tiny={"word_embed_proj_dim": 32}),
    ZooModel(
        "BLOOM-560M",
        "BloomModel",
        DECODER,
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        layers=("n_layer",),
    ),
    ZooModel(
        "StableLM-2-1.6B",
        "StableLmModel",
        DECODER,
        _sizes(2048, 24, 32, 5632, partial_rotary_factor=0.25, use_qkv_bias=True, vocab_size=100352),
    ),
    ZooModel(
        "Granite-3-2B",
        "GraniteModel",
        DECODER,
        _sizes(2048, 40, 32, 8192, num_key_value_heads=8, vocab_size=49155) | GRANITE,
    ),
)
# Sizes of a layer's experts are `intermediate_size` of each; the weights of all are 13.8 and 2.7 GB in half precision.
MIXTURES = (
    ZooModel(
        "OLMoE-1B-7B",
        "OlmoeModel",
        DECODER,
        _sizes(2048, 16, 16, 1024),
        tiny={"num_experts": 4, "num_experts_per_tok": 2},
    ),
    ZooModel(
        "Granite-3-1B-A400M",
        "GraniteMoeModel",
        DECODER,
        _sizes(1024, 24, 16, 512, num_key_value_heads=8, num_local_experts=32, num_experts_per_tok=8, vocab_size=49155)
        | GRANITE,
        tiny={"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
)
PAIRS = (
    ZooModel(
        "BART-base",
        "BartModel",
        TEXT,
        _sides(768, 6, 12, 3072),
        names=PAIR,
        layers=("encoder_layers", "decoder_layers"),
    ),
    ZooModel("T5-v1.1-base", "T5Model", TEXT, T5, names=PAIR, layers=("num_layers", "num_decoder_layers")),
)
IMAGES = (
    _image("DINOv2-base", "Dinov2Model", ((1, 518), (16, 224)), {"image_size": 518, "patch_size": 14}, side=56),
    _image("SigLIP-base", "SiglipVisionModel", PICTURE, _sizes(768, 12, 12, 3072, image_size=224)),
    _image("CLIP-ViT-B-16", "CLIPVisionModel", PICTURE, {"patch_size": 16}),
    _image("BEiT-base", "BeitModel", PICTURE, {"use_relative_position_bias": True}),
    _image(
        "Swin-tiny",
        "SwinModel",
        PICTURE,
        {},
        side=32,
        layers=(),
        tiny={"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    ),
)
SOUND = (
    ZooModel(
        "Whisper-small-encoder",
        "WhisperEncoder",
        ((1, 3000), (4, 3000)),
        {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072},
        MEL,
        ("input_features",),
        ("encoder_layers",),
        bins=80,
        bins_first=True,
        tiny={"max_source_positions": 16},
    ),
    ZooModel(
        "wav2vec2-base",
        "Wav2Vec2Model",
        ((1, 10), (4, 10)),
        {"apply_spec_augment": False},
        SPEECH,
        ("input_values",),
        tiny={"conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        tiny_length=1,
    ),
    ZooModel(
        "AST-base",
        "ASTModel",
        ((1, 1024), (8, 1024)),
        {},
        MEL,
        ("input_values",),
        bins=128,
        tiny={"max_length": 32},
    ),
)
DENOISERS = (
    ZooModel(
        "PixArt-XL-2-512",
        "PixArtTransformer2DModel",
        ((1, 512), (8, 512)),
        {"sample_size": 64, "caption_channels": 4096},
        LATENTS,
        layers=("num_layers",),
        channels=4,
        text=(120, 4096),
        tiny={"num_layers": 2, "num_attention_heads": 4, "cross_attention_dim": 64, "sample_size": 8, **NARROW},
        tiny_length=64,
    ),
    ZooModel(
        "Wan-2.1-T2V-1.3B",
        "WanTransformer3DModel",
        ((1, 17), (1, 81)),
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        LATENTS,
        layers=("num_layers",),
        channels=16,
        text=(512, 4096),
        sides=(60, 104),
        tiny={"num_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, **NARROW},
        tiny_length=1,
    ),
)
MODELS = {model.published: model for model in (*ENCODERS, *DECODERS, *MIXTURES, *PAIRS, *IMAGES, *SOUND, *DENOISERS)}
