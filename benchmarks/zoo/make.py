"""Makes a model of the zoo and its inputs: the same in every process, nothing downloaded."""

import contextlib
from dataclasses import replace

import torch
from torch import nn

from benchmarks.zoo.cases import ZooCase
from benchmarks.zoo.diffusion import Denoiser, make_denoiser, row_length
from benchmarks.zoo.models import IMAGE, LATENTS, MODELS, SPEECH, TOKENS, ZooModel
from benchmarks.zoo.weights import fill

SAMPLING_HZ = 16_000
LAYERS_TINY = 2
# Sizes for dry runs; a configuration takes those that it has under these very names.
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "embedding_size": 32,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "dim": 64,
    "hidden_dim": 128,
    "n_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


class LastHiddenState(nn.Module):
    """A transformers model as a function of one tensor; its head and what it pools are left out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x):
        return self.model(**dict.fromkeys(self.names, x)).last_hidden_state

    @property
    def attention(self) -> str:
        """Transformers' name of the attention that the model runs."""
        return self.model.config._attn_implementation


def make_model(
    case: ZooCase, attention: str = "sdpa", small: bool = False, layers: int | None = None
) -> LastHiddenState | Denoiser:
    """The case's model in its dtype, on the CPU; `attention` is transformers' attn_implementation.

    A model that transformers refuses with "sdpa" gets "eager"; ValueError where it refuses another.  `small` makes few
    narrow layers, for dry runs; `layers` makes so many in full width.
    """
    zoo = MODELS[case.model]
    if layers is not None:
        zoo = replace(zoo, sizes=zoo.sizes | dict.fromkeys(zoo.layers, layers))
    try:
        return _made(zoo, case, attention, small)
    except ValueError:
        if attention != "sdpa":
            raise
        return _made(zoo, case, "eager", small)


def _made(zoo: ZooModel, case: ZooCase, attention: str, small: bool) -> LastHiddenState | Denoiser:
    if zoo.input == LATENTS:
        from transformers.initialization import no_init_weights

        with no_init_weights():
            return make_denoiser(zoo, case.length, getattr(torch, case.dtype), attention, small)
    return LastHiddenState(transformers_model(zoo, case.dtype, attention, small), zoo.names).eval()


def transformers_model(zoo: ZooModel, dtype: str, attention: str = "sdpa", small: bool = False) -> nn.Module:
    """The model of transformers itself, in evaluation mode, without a cache; arguments are those of `make_model`."""
    from transformers.initialization import no_init_weights

    kind = _class(zoo.kind)
    sizes = zoo.sizes
    if small:
        known, aliases = kind.config_class(), kind.config_class.attribute_map
        narrow = {name: size for name, size in TINY.items() if hasattr(known, name) and name not in aliases}
        sizes = sizes | narrow | dict.fromkeys(zoo.layers, LAYERS_TINY) | zoo.tiny
    config = kind.config_class(**sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._attn_implementation = attention
    # As `from_pretrained` with a dtype: buffers that a class makes in float32, such as rotary frequencies, stay so.
    with no_init_weights(), _default_dtype(getattr(torch, dtype)):
        model = kind(config)
    model.tie_weights()
    fill(model)
    return model.eval()


def make_inputs(case: ZooCase, count: int, device: str) -> list[torch.Tensor]:
    """Random token ids (batch, length), int64, or images, sound or latents in the case's dtype."""
    zoo = MODELS[case.model]
    generator = torch.Generator(device=device).manual_seed(0)
    if zoo.input == TOKENS:
        shape = case.batch, case.length
        return [torch.randint(*zoo.ids, shape, generator=generator, device=device) for _ in range(count)]
    if zoo.input == IMAGE:
        shape = case.batch, 3, case.length, case.length
    elif zoo.input == LATENTS:
        shape = case.batch, row_length(zoo, case.length)
    elif zoo.input == SPEECH:
        shape = case.batch, case.length * SAMPLING_HZ
    else:
        shape = (case.batch, zoo.bins, case.length) if zoo.bins_first else (case.batch, case.length, zoo.bins)
    dtype = getattr(torch, case.dtype)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(count)]


def _class(kind: str) -> type:
    import transformers as hf

    return getattr(hf, kind, None) or getattr(hf.models.whisper.modeling_whisper, kind)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
