"""Layers of diffusers' Wan under sliding tiles: this project's engine beside torch.compile with FlexAttention.

Both see tokens tile by tile inside of the blocks: ours by its own pass.  The reference keeps rows of the dense mask,
some at a time.
"""

import os
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.models.measure import clocked
from benchmarks.video.attention import flex_mask
from benchmarks.video.cases import OURS, Case, Tiles
from benchmarks.zoo.weights import fill

TEXT, CHANNELS, PATCH = 512, 16, (1, 2, 2)
SHARP = 3.0  # the weight of the norms of q: at 1, random queries weigh all keys alike, and the mask hardly counts
INPUTS, WARM_UP = 3, 3
QUICK = {"kind": "llvm", "opt-level": 0}


def make_model(case: Case, small: bool, dtype=torch.bfloat16):
    """Wan with random weights on the CPU: the published sizes, or small ones; gates are about 1."""
    import diffusers

    sizes = {"ffn_dim": 64, "text_dim": 24, "freq_dim": 16, "rope_max_seq_len": 64} if small else {"ffn_dim": 8960}
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=case.heads, attention_head_dim=case.head_dim, num_layers=case.layers, patch_size=PATCH,
        in_channels=CHANNELS, out_channels=CHANNELS, **sizes,
    )  # fmt: skip
    fill(model)
    for block in model.blocks:
        block.attn1.norm_q.weight.data.fill_(SHARP)
        block.scale_shift_table.data[:, [2, 5]] += 1
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def make_inputs(case: Case, count: int, device: str, small: bool, seed: int) -> list[dict]:
    """Keyword arguments of the model, fresh ones for each call."""
    generator = torch.Generator(device).manual_seed(seed)
    latents = [n * step for n, step in zip(case.canvas, PATCH, strict=True)]
    text = (5, 24) if small else (TEXT, 4096)
    shapes = {"hidden_states": (1, CHANNELS, *latents), "encoder_hidden_states": (1, *text)}
    return [
        {name: torch.randn(s, device=device, generator=generator).bfloat16() for name, s in shapes.items()}
        | {"timestep": torch.tensor([float(7 + number)], device=device), "return_dict": False}
        for number in range(count)
    ]


def get_ready(case: Case, system: str, device: str, small: bool) -> tuple[dict, Callable[[], dict]]:
    """Build or compile a system and warm it up; the second result checks and times it (benchmarks/models/worker.py)."""
    seed = int.from_bytes(os.urandom(4), "little")
    inputs = make_inputs(case, INPUTS, device, small, seed)
    tiles = case.tiles(device)
    call, variant = (_stof if system == OURS else _compiled)(case, tiles, device, small)
    for some in (inputs * WARM_UP)[:WARM_UP]:
        call(some)
    if device == "cuda":
        torch.cuda.synchronize()
    facts = {"seed": seed, "variant": variant, "density": tiles.kept / case.length**2}
    return facts, lambda: _measure(call, case, tiles, inputs, device, small)


def _measure(call, case: Case, tiles: Tiles, inputs: list[dict], device: str, small: bool) -> dict:
    torch.backends.cudnn.allow_tf32 = False  # else the patches' convolution in float32 is none
    model = make_model(case, small).to(device)
    half = reference(model, case, tiles, inputs[0])
    exact = reference(model.float(), case, tiles, inputs[0])
    del model
    out = call(inputs[0]).float()
    error = float((out - exact).abs().max()) if bool(out.isfinite().all()) else float("nan")
    half_error = max(float((half - exact).abs().max()), torch.finfo(torch.float32).eps)
    found = {"error": error, "half_error": half_error, "median_us": None}
    if not error <= 2 * half_error:
        return found
    if device == "cuda":
        torch.cuda.empty_cache()
    return found | clocked([lambda some=some: call(some) for some in inputs], device)


def reference(model, case: Case, tiles: Tiles, given: dict) -> torch.Tensor:
    """The model's output in float32, computed in the precision of its weights under rows of the dense mask."""
    dtype = model.proj_out.weight.dtype
    given = {name: x.to(dtype) if isinstance(x, torch.Tensor) and x.ndim > 1 else x for name, x in given.items()}
    rows = max(1, (1 << 30) // (case.length * case.heads * 4))

    def attend(q, k, v):
        out = torch.empty_like(q)
        for some in torch.arange(case.length, device=q.device).split(rows):
            scores = (q[:, :, some] @ k.mT * case.head_dim**-0.5).masked_fill(~tiles.rows(some), float("-inf"))
            out[:, :, some] = scores.softmax(-1) @ v
        return out

    with attention(case, attend):
        return in_tiles(model, case)(**given)[0].float()


class Tiled(torch.nn.Module):
    """Wan's blocks between a gather of tokens into tile order, with their rotary tables, and one back."""

    def __init__(self, blocks, case: Case):
        super().__init__()
        self.blocks = blocks
        self.register_buffer("order", case.tiles("cpu").order)
        self.register_buffer("inverse", self.order.argsort())

    def forward(self, x, text, time, rotary):
        x, rotary = x[:, self.order], tuple(table[:, self.order] for table in rotary)
        for block in self.blocks:
            x = block(x, text, time, rotary)
        return x[:, self.inverse]


def in_tiles(model, case: Case):
    """The model, whose blocks are `Tiled` from now on."""
    if not isinstance(model.blocks[0], Tiled):
        model.blocks = torch.nn.ModuleList([Tiled(model.blocks, case).to(model.proj_out.weight.device)])
    return model


def attention(case: Case, attend: Callable):
    """While the context is open, attention of the tokens with one another is `attend(q, k, v)` of (B, H, S, D)."""
    from diffusers.models.transformers import transformer_wan

    def dispatch(query, key, value, **_):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        function = attend if q.shape[2] == k.shape[2] == case.length else F.scaled_dot_product_attention
        return function(q, k, v).transpose(1, 2)

    return patch.object(transformer_wan, "dispatch_attention_fn", dispatch)


def _stof(case: Case, tiles: Tiles, device: str, small: bool):
    import stof_tvm
    from stof_tvm import masks

    model = make_model(case, small)
    mask = masks.sliding_tile(case.canvas, case.tile, case.window, order="row-major")
    example = make_inputs(case, 1, "cpu", small, 0)[0]
    # Not verified by `build`, which would compute in PyTorch under a dense mask: the benchmark itself compares.
    engine = stof_tvm.build(model, QUICK if device == "cpu" else None, example, {"blocks.*.attn1": mask}, verify=False)
    report = engine.report()
    variant = "; ".join(sorted({f"{site.kernel} {site.config}" for site in report.rewritten}))
    return lambda given: engine(**given)[0], f"{variant}; {len(report.segments)} segments"


def _compiled(case: Case, tiles: Tiles, device: str, small: bool):
    from torch.nn.attention.flex_attention import flex_attention

    model = in_tiles(make_model(case, small).to(device), case)
    block_mask, _ = flex_mask(tiles)
    # One function for all calls: another one would be compiled again.
    replaced = attention(case, lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask)).new
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False) if device == "cuda" else model

    def call(given):
        from diffusers.models.transformers import transformer_wan

        with patch.object(transformer_wan, "dispatch_attention_fn", replaced):
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            return compiled(**given)[0]

    return call, f"torch {torch.__version__} reduce-overhead"
