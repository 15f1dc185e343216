"""From PyTorch models to Relax: torch.export, then our converters where TVM 0.27's are wrong; attention stays whole.

Attention that PyTorch spells with scaled_dot_product_attention comes out as the composite of
`relax_passes.attention.composite`.  Attention spelled by hand comes out as relax.matmul, relax.nn.softmax and so on,
and each softmax says where in the model it stands: `call.span.source_name.name` is the path of the module that spells
it, "" for the root, with "#1", "#2"… appended from a module's second attention or softmax on.
"""

from stof_tvm.frontend.import_model import ImportedModel, import_model

__all__ = ["ImportedModel", "import_model"]
