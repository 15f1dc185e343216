"""Models of transformers on sparse kernels: `attn_implementation="stof"`.

    import stof_tvm.transformers                                # registers the name "stof"
    model = LlamaForCausalLM.from_pretrained(…, attn_implementation="stof")
    stof_tvm.transformers.set_mask(model, masks.sliding_window(128))    # in addition to the model's own mask

Each attention runs by `stof_tvm.sparse_attention`; everything else stays PyTorch's.  The mask of a call (causal,
windows, chunks, packed sequences, padding) becomes blocks that the kernel skips, without an Sq × Skv tensor.
"""

from stof_tvm.running.needs_transformers import needs_transformers

with needs_transformers("stof_tvm.transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface

from stof_tvm.transformers.attention import stof_attention
from stof_tvm.transformers.class_tables import refuse_in_class_tables
from stof_tvm.transformers.model_mask import stof_mask
from stof_tvm.transformers.pipeline_model import as_model
from stof_tvm.transformers.set_mask import NAME, set_mask

__all__ = ["as_model", "set_mask"]

AttentionInterface.register(NAME, stof_attention)
AttentionMaskInterface.register(NAME, stof_mask)
refuse_in_class_tables(NAME)
