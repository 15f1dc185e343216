"""Reshapes that add or drop axes of length 1: an element's indices are those of its operand's, without arithmetic.

TVM computes a flat index and takes it apart again.  Its simplifier undoes that where each index is an axis of a loop,
but not behind a concatenation, which shifts an index: the two halves of `stack([a, b], -1)` became expressions whose
simplification took half a minute, in interleaved rotary embeddings for example.
"""

from tvm import te, tirx


def _reshape(builder, call):
    """A legalization of relax.reshape."""
    before, after = call.args[0].ty.shape, call.ty.shape
    if not all(isinstance(n, tirx.IntImm) for shape in (before, after) for n in shape):
        return call.op.get_attr("FLegalize")(builder, call)
    before, after = [int(n) for n in before], [int(n) for n in after]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return call.op.get_attr("FLegalize")(builder, call)

    def compute(x):
        def element(*axes):
            kept = iter([axis for axis, n in zip(axes, after) if n != 1])
            return x(*[0 if n == 1 else next(kept) for n in before])

        return te.compute(after, element, name="T_reshape")

    return builder.call_te(compute, call.args[0], primfunc_name_hint="reshape")


RESHAPES = {"relax.reshape": _reshape}
