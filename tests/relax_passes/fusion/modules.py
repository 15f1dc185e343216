"""Small Relax modules around attention, and running one on this CPU."""

import numpy as np
import tvm
from tvm import relax
from tvm.script import tirx as T

from tests.models.quick_llvm import QUICK_LLVM, run_linked

op = relax.op
B, S, HEADS, SIZE = 2, 4, 2, 4
WIDTH = HEADS * SIZE


@T.prim_func(s_tir=True)
def attention_kernel(
    q: T.Buffer((2, 4, 2, 4), "float32"),
    k: T.Buffer((2, 4, 2, 4), "float32"),
    v: T.Buffer((2, 4, 2, 4), "float32"),
    out: T.Buffer((2, 4, 2, 4), "float32"),
):
    """Stands for attention: what matters is that it is a call of a kernel."""
    T.func_attr({"op_pattern": 8, "tirx.is_scheduled": True})
    for b, s, h, d in T.grid(2, 4, 2, 4):
        with T.sblock("attend"):
            i, j, m, n = T.axis.remap("SSSS", [b, s, h, d])
            out[i, j, m, n] = q[i, j, m, n] * k[i, 3 - j, m, n] + v[i, j, m, 3 - n]


def weight(*shape, seed=0) -> relax.Expr:
    return relax.const((np.random.default_rng([seed, *shape]).standard_normal(shape) / 4).astype("float32"))


def function_of(params, body) -> relax.Function:
    """A function whose one dataflow block is what `body(emit)` emits and returns."""
    return module_of(params, lambda builder: body(builder.emit))["main"]


def module_of(params, body) -> tvm.IRModule:
    """A module whose "main" has one dataflow block; `body(builder)` returns the result."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(body(builder))
        builder.emit_func_output(output)
    return relax.transform.CanonicalizeBindings()(builder.finalize())


def linear(emit, x, n, seed=0, bias=True):
    """x @ wᵀ + bias, as the importer writes it."""
    product = emit(op.matmul(x, emit(op.permute_dims(weight(n, int(x.ty.shape[-1]), seed=seed)))))
    return emit(op.add(product, weight(n, seed=seed))) if bias else product


def attend(builder, q, k, v):
    emit = builder.emit
    heads = [emit(op.reshape(x, (B, S, HEADS, SIZE))) for x in (q, k, v)]
    kernel = builder.add_func(attention_kernel, "attention_kernel")
    out = emit(relax.call_tir(kernel, heads, relax.TensorType((B, S, HEADS, SIZE), "float32")))
    return emit(op.reshape(out, (B, S, WIDTH)))


def norm(emit, x, seed=0):
    n = int(x.ty.shape[-1])
    return emit(op.nn.layer_norm(x, weight(n, seed=seed), weight(n, seed=seed + 1), [-1], 1e-5))


def activations() -> relax.Var:
    return relax.Var("x", relax.TensorType((B, S, WIDTH), "float32"))


def post_norm_layer() -> tvm.IRModule:
    """BERT's layer: three projections, attention, projection + residual + norm, MLP + residual + norm."""
    x = activations()

    def body(builder):
        emit = builder.emit
        attended = attend(builder, *(linear(emit, x, WIDTH, seed) for seed in range(3)))
        h = norm(emit, emit(op.add(x, linear(emit, attended, WIDTH, 3))))
        wide = emit(op.nn.gelu(linear(emit, h, 2 * WIDTH, 4)))
        return norm(emit, emit(op.add(h, linear(emit, wide, WIDTH, 5))), 6)

    return module_of([x], body)


def pre_norm_mlp() -> tvm.IRModule:
    """x + W gelu(V norm(x + a)): the sum and its norm are both read again."""
    x, a = activations(), relax.Var("a", relax.TensorType((B, S, WIDTH), "float32"))

    def body(builder):
        emit = builder.emit
        total = emit(op.add(x, a))
        wide = emit(op.nn.gelu(linear(emit, norm(emit, total), 2 * WIDTH, 1)))
        return emit(op.add(total, linear(emit, wide, WIDTH, 2)))

    return module_of([x, a], body)


def gated_mlp() -> tvm.IRModule:
    """LLaMA's: x + W (silu(G h) * U h) with h = rms_norm(x)."""
    x = activations()

    def body(builder):
        emit = builder.emit
        h = emit(op.nn.rms_norm(x, weight(WIDTH), [-1], 1e-6))
        gate = emit(op.nn.silu(linear(emit, h, 2 * WIDTH, 1, bias=False)))
        up = linear(emit, h, 2 * WIDTH, 2, bias=False)
        return emit(op.add(x, linear(emit, emit(op.multiply(gate, up)), WIDTH, 3, bias=False)))

    return module_of([x], body)


def encoder_decoder() -> tvm.IRModule:
    """A decoder that attends to what an encoder made of another input; bindings in the order of writing."""
    source, x = relax.Var("source", relax.TensorType((B, S, WIDTH), "float32")), activations()

    def body(builder):
        emit = builder.emit
        h = norm(emit, source)
        h = emit(op.add(source, linear(emit, emit(op.nn.gelu(linear(emit, h, WIDTH, 1, False))), WIDTH, 2, False)))
        q = linear(emit, x, WIDTH, 3, False)
        k, v = (linear(emit, h, WIDTH, seed, False) for seed in (4, 5))
        return emit(op.add(x, linear(emit, attend(builder, q, k, v), WIDTH, 6, False)))

    return module_of([source, x], body)


def run(mod: tvm.IRModule, *inputs) -> list[np.ndarray]:
    """What "main" computes on this CPU."""
    with QUICK_LLVM:
        program = run_linked(tvm.compile(mod, target=QUICK_LLVM))["main"]
    result = program(*(tvm.runtime.tensor(x) for x in inputs))
    return [x.numpy() for x in (result if isinstance(result, tuple | list | tvm.ir.Array) else [result])]


def inputs_of(mod: tvm.IRModule) -> list[np.ndarray]:
    """Seeded inputs of "main"."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal([int(n) for n in p.ty.shape]).astype("float32") for p in mod["main"].params]
