"""Small transformers of diffusers from configurations, nothing downloaded: model and keyword inputs by class."""

import torch

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
ONE_OF_EACH = {**HEADS, "num_single_layers": 1}
IMAGE = {"in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2}
VIDEO = {"in_channels": 4, "out_channels": 4}

# Arguments of the class, and what of `inputs` a call has.
MODELS = {
    "DiTTransformer2DModel": ({**HEADS, **IMAGE, "norm_num_groups": 4}, "image timestep class_labels"),
    "PixArtTransformer2DModel": (
        {**HEADS, **IMAGE, "cross_attention_dim": 32, "caption_channels": 24, "norm_num_groups": 4},
        "image timestep text encoder_attention_mask added_cond_kwargs",
    ),
    "SanaTransformer2DModel": (
        {
            **HEADS,
            **IMAGE,
            "patch_size": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 24,
        },
        "image timestep text encoder_attention_mask",
    ),
    "SD3Transformer2DModel": (
        {
            **HEADS,
            **IMAGE,
            "num_layers": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 12,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        "image timestep text pooled_projections",
    ),
    "AuraFlowTransformer2DModel": (
        {
            **IMAGE,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        "image fraction text",
    ),
    "FluxTransformer2DModel": (
        {
            **ONE_OF_EACH,
            "in_channels": 4,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 12,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
        "tokens fraction text pooled_projections guidance img_ids txt_ids",
    ),
    "Flux2Transformer2DModel": (
        {
            **ONE_OF_EACH,
            "in_channels": 4,
            "joint_attention_dim": 24,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        "tokens fraction text guidance img_ids4 txt_ids4",
    ),
    "ChromaTransformer2DModel": (
        {
            **ONE_OF_EACH,
            "in_channels": 4,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        "tokens fraction text img_ids txt_ids joint_mask",
    ),
    "QwenImageTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
        },
        "wide_tokens fraction text encoder_hidden_states_mask img_shapes",
    ),
    "CogView4Transformer2DModel": (
        {
            **HEADS,
            **IMAGE,
            "text_embed_dim": 24,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 8,
            "rope_axes_dim": (8, 8),
        },
        "image timestep text original_size target_size crop_coords",
    ),
    "Lumina2Transformer2DModel": (
        {
            **IMAGE,
            "hidden_size": 32,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": 24,
        },
        "image timestep text encoder_attention_mask",
    ),
    "WanTransformer3DModel": (
        {**HEADS, **VIDEO, "text_dim": 24, "freq_dim": 16, "ffn_dim": 64, "rope_max_seq_len": 16},
        "video timestep text",
    ),
    "HunyuanVideoTransformer3DModel": (
        {
            **ONE_OF_EACH,
            **VIDEO,
            "num_refiner_layers": 1,
            "text_embed_dim": 24,
            "pooled_projection_dim": 12,
            "rope_axes_dim": (4, 6, 6),
        },
        "video timestep text encoder_attention_mask pooled_projections guidance",
    ),
    "LTXVideoTransformer3DModel": (
        {**HEADS, **VIDEO, "cross_attention_dim": 32, "caption_channels": 24},
        "video_tokens timestep text encoder_attention_mask num_frames height width",
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            **VIDEO,
            "time_embed_dim": 16,
            "text_embed_dim": 24,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 8,
            "use_rotary_positional_embeddings": True,
        },
        "frames timestep text image_rotary_emb",
    ),
    "MochiTransformer3DModel": (
        {
            **HEADS,
            **VIDEO,
            "pooled_projection_dim": 12,
            "text_embed_dim": 24,
            "time_embed_dim": 16,
            "max_sequence_length": 8,
        },
        "video timestep text encoder_attention_mask",
    ),
}

# The arguments of what `_input` has under another name.
ARGUMENTS = {"joint_mask": "attention_mask", "img_ids4": "img_ids", "txt_ids4": "txt_ids", "fraction": "timestep"}


def make_diffusers(name: str) -> tuple[torch.nn.Module, dict]:
    """A model by its class, seeded, in evaluation mode, and the keyword arguments of a call for two samples."""
    import diffusers

    torch.manual_seed(0)
    sizes, names = MODELS[name]
    model = getattr(diffusers, name)(**sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # gates and outputs that a training starts at zero would hide what is before them
                parameter.normal_(0, 0.1)
    return model, dict(_input(name) for name in names.split())


def _input(name: str) -> tuple[str, object]:
    """An argument and its value for 2 samples: images of 8 x 8, videos of 2 frames, texts of 8 tokens, one padded."""
    hidden = "hidden_states"
    shapes = {
        "image": (hidden, (2, 4, 8, 8)),
        "video": (hidden, (2, 4, 2, 8, 8)),
        "frames": (hidden, (2, 2, 4, 8, 8)),
        "tokens": (hidden, (2, 16, 4)),
        "wide_tokens": (hidden, (2, 16, 16)),
        "video_tokens": (hidden, (2, 32, 4)),
        "text": ("encoder_hidden_states", (2, 8, 24)),
        "pooled_projections": (name, (2, 12)),
    }
    if name in shapes:
        return shapes[name][0], torch.randn(shapes[name][1])
    keep = torch.ones(2, 8, dtype=torch.int64)
    keep[-1, 5:] = 0
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    places = torch.stack((0 * rows, rows, columns), dim=-1).reshape(16, 3).float()
    angles = torch.arange(32)[:, None] / 10 * torch.linspace(1, 0.1, 8).repeat_interleave(2)
    values = {
        "timestep": torch.tensor([3.0, 500.0]),
        "fraction": torch.tensor([0.25, 0.5]),
        "class_labels": torch.tensor([3, 7]),
        "guidance": torch.tensor([3.5, 1.0]),
        "encoder_attention_mask": keep,
        "encoder_hidden_states_mask": keep.bool(),
        "joint_mask": torch.cat((keep, torch.ones(2, 16, dtype=torch.int64)), dim=1).bool(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "img_ids": places,
        "txt_ids": torch.zeros(8, 3),
        "img_ids4": torch.nn.functional.pad(places, (0, 1)),
        "txt_ids4": torch.nn.functional.pad(torch.arange(8.0)[:, None], (3, 0)),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "padding_mask": torch.zeros(1, 1, 8, 8),
    }
    sizes = {"original_size": (64, 64), "target_size": (64, 64), "crop_coords": (0, 0)}
    if name in sizes:
        return name, torch.tensor([sizes[name]] * 2).float()
    return ARGUMENTS.get(name, name), values[name]
