"""The converter of each ATen operator: ours, or TVM's where it was found to compute what PyTorch computes."""

from stof_tvm.frontend.operators.attention import ATTENTION_CONVERTERS
from stof_tvm.frontend.operators.converters import CONVERTERS
from stof_tvm.frontend.operators.convolving import CONVOLUTION_CONVERTERS
from stof_tvm.frontend.operators.elementwise.pointwise import POINTWISE_CONVERTERS
from stof_tvm.frontend.operators.indexing.counting import COUNTING_CONVERTERS
from stof_tvm.frontend.operators.indexing.embedding_bag import EMBEDDING_BAG_CONVERTERS
from stof_tvm.frontend.operators.indexing.reading import INDEXING_CONVERTERS
from stof_tvm.frontend.operators.indexing.slices import SLICE_CONVERTERS
from stof_tvm.frontend.operators.indexing.writing import WRITING_CONVERTERS
from stof_tvm.frontend.operators.normalizing import NORMALIZING_CONVERTERS
from stof_tvm.frontend.operators.ordering import ORDERING_CONVERTERS
from stof_tvm.frontend.operators.pooling import POOLING_CONVERTERS
from stof_tvm.frontend.operators.products.grouped import GROUPED_CONVERTERS, LIBRARY_CONVERTERS
from stof_tvm.frontend.operators.reductions import REDUCTION_CONVERTERS
from stof_tvm.frontend.operators.resizing import RESIZING_CONVERTERS
from stof_tvm.frontend.operators.whole_operators import WHOLE_CONVERTERS

# Each is `f(context, *arguments)`, its arguments in the order of the operator's schema.
OURS = {
    **POINTWISE_CONVERTERS,
    **REDUCTION_CONVERTERS,
    **ORDERING_CONVERTERS,
    **CONVOLUTION_CONVERTERS,
    **NORMALIZING_CONVERTERS,
    **POOLING_CONVERTERS,
    **RESIZING_CONVERTERS,
    **INDEXING_CONVERTERS,
    **WRITING_CONVERTERS,
    **CONVERTERS,
    **WHOLE_CONVERTERS,
    **ATTENTION_CONVERTERS,
    **SLICE_CONVERTERS,
    **COUNTING_CONVERTERS,
    **EMBEDDING_BAG_CONVERTERS,
    **GROUPED_CONVERTERS,
    **{name: convert for (_, name), convert in LIBRARY_CONVERTERS.items()},
}
# Operators that are not ATen's: (namespace, name).
OF_LIBRARIES = frozenset(LIBRARY_CONVERTERS)
# TVM's own converters in use: those of views, and of operators without an option that TVM would ignore.
FROM_TVM = (
    *("alias.default", "expand.default", "permute.default", "repeat.default", "view.default", "unsqueeze.default"),
    *("squeeze.dim", "squeeze.dims", "split_with_sizes.default"),
    *("silu.default", "getitem"),
    # These read a shape that depends on values; the operator that makes such a shape is refused by name before.
    *("sym_size.int", "ge", "le"),
    *("_assert_tensor_metadata.default", "_assert_async.default", "_assert_async.msg", "_assert_scalar.default"),
)
