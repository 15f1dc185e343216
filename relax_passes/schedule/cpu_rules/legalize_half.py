"""fp16 and bf16 operators whose sums need fp32: operands are converted inside the function, where tiling sees it."""

from tvm import te, tirx, topi
from tvm.ir import Op

HALF = ("float16", "bfloat16")


def legalize_matmul(builder, call):
    """A product of fp16 or bf16 matrices as a product of their fp32 conversions, rounded once; others as TVM does.

    Batch axes broadcast as in NumPy; both operands need at least two axes.
    """
    if not _is_half(call) or any(len(operand.ty.shape) < 2 for operand in call.args):
        return Op.get("relax.matmul").get_attr("FLegalize")(builder, call)
    dtype = str(call.ty.dtype)

    def product(lhs, rhs):
        lhs, rhs = (_to_fp32(operand) for operand in (lhs, rhs))
        k = te.reduce_axis((0, lhs.shape[-1]), name="k")

        def element(*index):
            *batch, row, column = index
            left = lhs(*_broadcast(lhs, batch), row, k)
            return te.sum(left * rhs(*_broadcast(rhs, batch), k, column), axis=k)

        result = te.compute(call.ty.shape, element, name="matmul")
        return result if dtype == "float32" else topi.cast(result, dtype)

    # Pattern 4: elementwise operators may be fused behind it.
    return builder.call_te(product, *call.args, primfunc_name_hint="matmul", primfunc_attrs={"op_pattern": 4})


def legalize_softmax(operator: str, compute):
    """Softmax or log-softmax of fp16 or bf16 through fp32; others as TVM does."""

    def legalize(builder, call):
        if not _is_half(call):
            return Op.get(operator).get_attr("FLegalize")(builder, call)
        return builder.call_te(
            lambda x: topi.cast(compute(_to_fp32(x), call.attrs.axis), str(call.ty.dtype)),
            call.args[0],
            primfunc_name_hint=operator.rsplit(".", 1)[1],
        )

    return legalize


HALF_LEGALIZATIONS = {
    "relax.matmul": legalize_matmul,
    "relax.nn.softmax": legalize_softmax("relax.nn.softmax", topi.nn.softmax),
    "relax.nn.log_softmax": legalize_softmax("relax.nn.log_softmax", topi.nn.log_softmax),
}


def _is_half(call) -> bool:
    return all(str(operand.ty.dtype) in HALF for operand in call.args)


def _to_fp32(tensor):
    return te.compute(tensor.shape, lambda *index: tensor(*index).astype("float32"), name=f"{tensor.op.name}_fp32")


def _broadcast(operand, batch) -> list:
    """The batch indices of an operand: the result's last ones, with 0 where the operand has length one."""
    sizes = operand.shape[:-2]
    indices = batch[len(batch) - len(sizes) :]
    return [
        tirx.const(0, "int64") if isinstance(size, tirx.IntImm) and int(size) == 1 else index
        for size, index in zip(sizes, indices, strict=True)
    ]
