"""VectorProducts: on a GPU, matrices times vectors side by side become sums of products.

    matmul(a, b)  =  sum(a * b, k)       a (…, m, k) and b (…, k, 1), or a (…, 1, k) and b (…, k, n)

Each element of the batch has a vector of its own, so there is no matrix product in it: templates of products refuse
those of few rows and those whose k is no multiple of 8, and fill a tile of 64 columns with one.  The sum is a group or
a reduction, which reads through the views before it, as ConvBERT's windows, and is bound by memory.

Preconditions: "main" is one dataflow block; after attention was rewritten, because decoding has such products; before
`PartitionSegments`.  A product is rewritten if

- its operands and its result have one dtype that groups and reductions take, not float64, all lengths are numbers,
  and none is 0;
- both operands depend on what a call gives: a weight times rows is an ordinary product;
- the vector's batch has as many elements as the result's, more than one;
- a * b has less than 2^31 elements, which are summed in float32 at least.
"""

import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.floats import HALVES
from relax_passes.ir.rebuild import rebuild

op = relax.op
MAX_ELEMENTS = 1 << 31
DTYPES = {*HALVES, "float32"}


@tvm.transform.module_pass(opt_level=0, name="VectorProducts")
class VectorProducts:
    """Rewrite such products of "main"."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        products = {var: call for var in bindings.values if (call := bindings.call(var, "matmul")) is not None}
        if not products:
            return mod
        closed = ClosedExpressions(bindings, bindings.weights)

        def replace(builder, var, new):
            call = products.get(var)
            if call is None or not _is_of_vectors(call, closed):
                return None
            a, b = map(new, call.args)
            return _summed(builder.emit, a, b, dtype_of(var))

        return rebuild(mod, replace)


def _is_of_vectors(call: relax.Call, closed: ClosedExpressions) -> bool:
    values = (*call.args, call)
    dtypes = {dtype_of(x) for x in values}
    if any(static_shape(x) is None for x in values) or len(dtypes) > 1 or not dtypes <= DTYPES:
        return False
    a, b, result = map(shape_of, values)
    if min(len(a), len(b)) < 3 or not math.prod(result) or any(closed.is_closed(x) for x in call.args):
        return False
    batch, (m, n), k = math.prod(result[:-2]), result[-2:], a[-1]
    vectors = a if m == 1 else b if n == 1 else None
    if vectors is None or not k or batch == 1 or math.prod(vectors[:-2]) != batch:
        return False
    return batch * m * n * k < MAX_ELEMENTS


def _summed(emit, a, b, dtype: str) -> relax.Expr:
    """sum(a * b) along k; the vector is turned to lie along it."""
    is_row = shape_of(a)[-2] == 1
    turned = a if is_row else b
    last = len(shape_of(turned)) - 1
    turned = emit(op.permute_dims(turned, [*range(last - 1), last, last - 1]))
    terms = [turned, b] if is_row else [a, turned]
    if dtype in HALVES:
        terms = [emit(op.astype(x, "float32")) for x in terms]
    total = emit(op.sum(emit(op.multiply(*terms)), [-2 if is_row else -1], keepdims=True))
    return op.astype(total, dtype) if dtype in HALVES else total
