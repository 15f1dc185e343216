"""Decompositions of operators for which PyTorch's default table has none.

`nn.TransformerEncoderLayer` in evaluation mode is one operator to TorchDynamo and to `torch.export(strict=True)`.
`grid_sample` gathers pixels at positions that another tensor gives.
"""

import torch
from torch.nn import functional

aten = torch.ops.aten
PER_QUERY_AND_KEY, PER_KEY, PER_HEAD = 0, 1, 2  # PyTorch's mask_type: (Sq, Skv), (B, Skv), (B, H, Sq, Skv)


def encoder_layer(
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """aten._transformer_encoder_layer_fwd: src (B, S, E) to (B, S, E).

    Elements of `mask` that are not zero are masked out, whatever its dtype.
    """

    def attend(x):
        qkv = functional.linear(x, qkv_weight, qkv_bias)
        q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=_kept(mask, mask_type))
        return functional.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x):
        x = functional.linear(x, ffn_weight_1, ffn_bias_1)
        x = functional.gelu(x) if use_gelu else functional.relu(x)
        return functional.linear(x, ffn_weight_2, ffn_bias_2)

    def norm_1(x):
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x):
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


def _kept(mask, mask_type):
    """The mask as scaled_dot_product_attention takes it."""
    if mask is None:
        return None
    kept = mask.to(torch.bool).logical_not()
    return kept[:, None, None, :] if mask_type == PER_KEY else kept


def grid_sampler_2d(x, grid, *modes):
    """PyTorch's own formula; half precision is computed in float32, because pixel positions need its digits."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return GRID_SAMPLER(x.float(), grid.float(), *modes).to(x.dtype)
    return GRID_SAMPLER(x, grid, *modes)


GRID_SAMPLER = torch._decomp.get_decompositions([aten.grid_sampler_2d])[aten.grid_sampler_2d.default]
# Of training: its statistics are states.
BATCH_NORM = torch._decomp.get_decompositions([aten._native_batch_norm_legit_functional])
DECOMPOSITIONS = {
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten.grid_sampler_2d.default: grid_sampler_2d,
    **BATCH_NORM,
}
