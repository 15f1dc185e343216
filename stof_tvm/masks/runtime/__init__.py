"""Masks found at run time: rules that look at queries and keys and say which blocks an attention keeps.

from stof_tvm import masks, sparse_attention
rule = masks.runtime.xattention(stride=16, mass=0.9)
out = sparse_attention(q, k, v, rule)
masks.recall(rule, q, k).mean
"""

from stof_tvm.masks.runtime.flash_prefill import flash_prefill
from stof_tvm.masks.runtime.flex_prefill import flex_prefill
from stof_tvm.masks.runtime.low_rank import low_rank
from stof_tvm.masks.runtime.per_head import per_head
from stof_tvm.masks.runtime.pooled import top_blocks
from stof_tvm.masks.runtime.rule import Rule, rule
from stof_tvm.masks.runtime.sparge import sparge
from stof_tvm.masks.runtime.vertical_slash import vertical_slash
from stof_tvm.masks.runtime.xattention import xattention

__all__ = [
    "Rule",
    "flash_prefill",
    "flex_prefill",
    "low_rank",
    "per_head",
    "rule",
    "sparge",
    "top_blocks",
    "vertical_slash",
    "xattention",
]
