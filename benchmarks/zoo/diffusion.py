"""Transformers of diffusers as functions of one tensor, which holds latents, a text's embedding, and a time."""

import math

import torch
from torch import nn

from benchmarks.zoo.models import ZooModel
from benchmarks.zoo.weights import fill

PIXELS, FRAMES = 8, 4  # that the autoencoder joins along each side, and in time after the first frame
TIMES = 100.0  # the times of normal numbers


def latent_shape(zoo: ZooModel, length: int) -> tuple[int, ...]:
    """(channels, height, width) of an image of `length` pixels a side, or (channels, frames, height, width)."""
    if not zoo.sides:
        return zoo.channels, length // PIXELS, length // PIXELS
    return zoo.channels, 1 + (length - 1) // FRAMES, *zoo.sides


def row_length(zoo: ZooModel, length: int) -> int:
    """How many numbers a sample of the input has."""
    return math.prod(latent_shape(zoo, length)) + math.prod(zoo.text) + 1


class Denoiser(nn.Module):
    """A model of diffusers as a function of one tensor (batch, row_length); returns (batch, channels, places)."""

    attention = "sdpa"

    def __init__(self, model: nn.Module, zoo: ZooModel, length: int):
        super().__init__()
        self.model, self.latents, self.text = model, latent_shape(zoo, length), zoo.text
        self.more = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}} if not zoo.sides else {}

    def forward(self, x):
        latents, text, time = x.split([math.prod(self.latents), math.prod(self.text), 1], dim=1)
        return self.model(
            hidden_states=latents.unflatten(1, self.latents),
            encoder_hidden_states=text.unflatten(1, self.text),
            timestep=time.flatten().float().abs() * TIMES,
            **self.more,
        ).sample.flatten(2)


def make_denoiser(zoo: ZooModel, length: int, dtype: torch.dtype, attention: str, small: bool) -> Denoiser:
    """The model in evaluation mode, on the CPU; ValueError for another attention than "sdpa".

    All parameters have the dtype; buffers, such as rotary tables, stay float32.
    """
    import diffusers

    if attention != Denoiser.attention:
        raise ValueError(f"models of diffusers run here with {Denoiser.attention}, not with {attention}")
    model = getattr(diffusers, zoo.kind)(**zoo.sizes | (zoo.tiny if small else {}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    fill(model)
    return Denoiser(model, zoo, length).eval()
