"""Products of sorted rows with the weight of each row's group, as mixtures of experts have them."""

from tvm import relax

from relax_passes.ir.bindings import dtype_of, operator, permutation
from relax_passes.ir.operators.grouped_products import grouped_product
from stof_tvm.frontend.operators.converters import matmul
from tir_kernels.errors import UnsupportedError

FORMS = "rows (m, k) by (groups, k, n), or matrices by as many"


def grouped_mm(context, a, w, offsets=None, bias=None, out_dtype=None):
    """Rows a (m, k), sorted by group, by w (groups, k, n): row i by the first group whose offset is larger than i.

    PyTorch leaves rows from the last offset on undefined; here they are 0.  Without offsets it is a batched product.
    """
    if bias is not None:
        raise UnsupportedError("a grouped product with a bias, which PyTorch does not compute either")
    if context.dtype != dtype_of(a):
        raise UnsupportedError(f"a grouped product of {dtype_of(a)} in {context.dtype}")
    ranks = len(a.ty.shape), len(w.ty.shape)
    if offsets is None and ranks == (3, 3):
        return matmul(context, a, w)
    if offsets is None or ranks != (2, 3):
        raise UnsupportedError(f"a grouped product of {ranks[0]}-D by {ranks[1]}-D tensors: only {FORMS}")
    transposed = context.builder.lookup_binding(w) if isinstance(w, relax.Var) else None
    if transposed is not None and operator(transposed) == "permute_dims" and permutation(transposed) == [0, 2, 1]:
        product = grouped_product(a, transposed.args[0], offsets, "nk")
    else:
        product = grouped_product(a, w, offsets, "kn")
    return context.emit_in_module(product)


def grouped_mm_fallback(context, a, w, offsets):
    """The operator of transformers that stands in for it where PyTorch's is not to be had."""
    return grouped_mm(context, a, w, offsets)


GROUPED_CONVERTERS = {"_grouped_mm.default": grouped_mm}
LIBRARY_CONVERTERS = {("transformers", "grouped_mm_fallback.default"): grouped_mm_fallback}  # (namespace, name)
