"""Reshapes become views again, and kernels that are no schedulable TensorIR do not stop that."""

import tvm
from tvm import relax
from tvm.script import tirx as T

from relax_passes.runtime.rewrite_reshapes import RewriteReshapes


@T.prim_func
def device_kernel(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    T.func_attr({"op_pattern": 8})
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([8])
    y[thread] = x[thread]


def module():
    """main(x) = reshape(kernel(x)), legalised."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            kernel = builder.add_func(device_kernel.without_attr("global_symbol"), "device_kernel")
            y = builder.emit(relax.call_tir(kernel, [x], relax.TensorType((8,), "float32")))
            out = builder.emit_output(builder.emit(relax.op.reshape(y, (2, 4))))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.finalize())


def callees(mod) -> list[str]:
    values = [binding.value for binding in mod["main"].body.blocks[0].bindings]
    return [call.op.name for call in values if isinstance(call, relax.Call)]


def test_a_reshape_after_a_device_kernel_becomes_a_view():
    before = module()
    assert callees(before) == ["relax.call_tir", "relax.call_tir"]
    after = RewriteReshapes()(before)
    assert callees(after) == ["relax.call_tir", "relax.reshape"]
    tvm.ir.assert_structural_equal(after["device_kernel"], before["device_kernel"])
