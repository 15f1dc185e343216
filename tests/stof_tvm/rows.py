"""Rows of the report that tests make up."""

from tir_kernels.report_rows import AttentionShape, RewrittenRow

ROW = RewrittenRow(
    site="layer.0",
    spelling="sdpa",
    reason="predicted 2 µs",
    kernel="block-wise",
    config="64x64",
    block=(64, 64),
    mask="causal()",
    mask_digest="0",
    shape=AttentionShape(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=8, dtype="float16"),
    layouts=("bhsd", "bhsd", "bhsd", "bhsd"),
    predicted_us=2.0,
    measured_us=None,
)
