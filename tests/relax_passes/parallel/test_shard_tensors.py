"""The program of a rank: the parts of all ranks add up to the whole, and what cannot be divided stays as it is."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.parallel import regions
from relax_passes.parallel.placement import Ranks
from relax_passes.parallel.shard_tensors import SHARDED, ShardTensors
from relax_passes.runtime.all_reduce_in_place import AllReduceInPlace

op = relax.op


def module(body, shape=(3, 8)) -> tvm.IRModule:
    """A module of one dataflow block: `body(emit, x)` gives its result."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, x))
        builder.emit_func_output(out)
    return builder.finalize()


def weight(*shape):
    return relax.const(np.random.default_rng(shape[0]).standard_normal(shape).astype("float32"))


def mlp(emit, x, hidden=12):
    """Plain, with biases: the second is added once, after the sum."""
    h = emit(op.nn.relu(emit(op.add(emit(op.matmul(x, weight(8, hidden))), weight(hidden)))))
    return op.add(emit(op.matmul(h, weight(hidden, 8))), weight(8))


def packed(emit, x):
    """Gate and input from one product, in halves."""
    halves = emit(op.split(emit(op.matmul(x, weight(8, 24))), 2, axis=-1))
    gate, value = (emit(relax.TupleGetItem(halves, n)) for n in range(2))
    return op.matmul(emit(op.multiply(emit(op.nn.silu(gate)), value)), weight(12, 8))


def sliced(emit, x):
    both = emit(op.matmul(x, weight(8, 24)))
    gate, value = (emit(op.strided_slice(both, [1], [n], [n + 12])) for n in (0, 12))
    return op.matmul(emit(op.multiply(emit(op.sigmoid(gate)), value)), weight(12, 8))


def rows_taken(emit, x):
    """Rows between the products, and of them one: ranks divide columns only."""
    h = emit(op.take(emit(op.matmul(x, weight(8, 12))), relax.const(np.array([2, 0]), "int64"), axis=0, mode="clip"))
    h = emit(op.take(emit(op.nn.relu(h)), relax.const(1, "int64"), axis=0, mode="clip"))
    return op.matmul(emit(op.reshape(h, (1, 12))), weight(12, 8))


def columns_taken(emit, x):
    h = emit(op.matmul(x, weight(8, 12)))
    h = emit(op.take(h, relax.const(np.arange(12)[::-1].copy(), "int64"), axis=1, mode="clip"))
    return op.matmul(h, weight(12, 8))


def normed(emit, x):
    """A norm between the products is over all that the ranks would divide."""
    h = emit(op.nn.rms_norm(emit(op.matmul(x, weight(8, 12))), weight(12), [-1]))
    return op.matmul(h, weight(12, 8))


def read_twice(emit, x):
    h = emit(op.matmul(x, weight(8, 12)))
    return op.add(emit(op.matmul(h, weight(12, 8))), emit(op.sum(h, axis=-1, keepdims=True)))


def run(mod, x, all_reduce=None):
    if all_reduce is not None:
        tvm.register_global_func("stof.test.all_reduce", all_reduce, override=True)
    executable = tvm.compile(mod, "llvm")
    return relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()


@pytest.mark.parametrize("body", [mlp, packed, sliced, rows_taken])
def test_the_terms_of_two_ranks_add_up(body):
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    mod = module(body)
    terms: list = []

    def keep(term, total):
        terms.append(term.numpy())
        total.copyfrom(np.zeros_like(terms[-1]))

    def add(term, total):
        total.copyfrom(terms[0] + term.numpy())

    run(ShardTensors(Ranks(0, 2, "stof.test.all_reduce"))(mod), x, keep)
    actual = run(ShardTensors(Ranks(1, 2, "stof.test.all_reduce"))(mod), x, add)
    assert len(terms) == 1
    np.testing.assert_allclose(actual, run(mod, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", [normed, columns_taken, read_twice, lambda emit, x: mlp(emit, x, hidden=9)])
def test_what_cannot_be_divided_stays_as_it_is(body):
    mod = module(body)
    after = ShardTensors(Ranks(0, 2, "stof.test.all_reduce"))(mod)
    assert json.loads(str(after.attrs[SHARDED]))["all_reduces"] == []
    tvm.ir.assert_structural_equal(after["main"], mod["main"])


def head(emit, x, transposed=True):
    """A last product with a bias; its weight is as PyTorch has it, (columns, inner)."""
    w = emit(op.permute_dims(weight(12, 8))) if transposed else weight(8, 12)
    return op.add(emit(op.matmul(emit(op.tanh(x)), w)), weight(12))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_columns_of_a_last_product_are_gathered(rows, transposed, monkeypatch):
    monkeypatch.setattr(regions, "LEAST_GATHERED", 12 * 8 * 4)
    monkeypatch.setattr(regions, "SHARE_GATHERED", 2)
    x = np.random.default_rng(0).standard_normal((rows, 8)).astype("float32")
    mod = module(lambda emit, x: head(emit, x, transposed), (rows, 8))
    parts: list = []

    def gather(part, every):
        parts.append(part.numpy())
        every.copyfrom(np.stack([parts[0], parts[-1]]))

    tvm.register_global_func("stof.test.all_gather", gather, override=True)
    ranks = [Ranks(rank, 2, "stof.test.all_reduce", "stof.test.all_gather") for rank in range(2)]
    programs = [ShardTensors(each)(mod) for each in ranks]
    run(programs[0], x)
    np.testing.assert_allclose(run(programs[1], x), run(mod, x), rtol=1e-5, atol=1e-5)
    assert [part.shape for part in parts] == [(rows, 6)] * 2
    assert "(12, 8)" not in str(programs[0]["main"])


@pytest.mark.parametrize("least", [12 * 8 * 4 + 1, 12 * 8 * 4])
def test_a_last_product_that_gains_nothing_stays_whole(least, monkeypatch):
    """Its weights are small, or it has many rows beside its inner size; or something else follows."""
    monkeypatch.setattr(regions, "LEAST_GATHERED", least)
    ranks = Ranks(0, 2, "stof.test.all_reduce", "stof.test.all_gather")
    rows = 1 if least > 12 * 8 * 4 else 2
    mods = [module(head, (rows, 8)), module(lambda emit, x: op.nn.softmax(emit(head(emit, x))), (1, 8))]
    for mod in mods:
        assert json.loads(str(ShardTensors(ranks)(mod).attrs[SHARDED]))["gathers"] == []


def test_a_sum_takes_the_memory_of_its_term_unless_something_else_reads_the_term():
    transform = relax.transform
    lowering = [
        *(transform.LegalizeOps(), transform.ToNonDataflow(), transform.RemovePurityChecking()),
        transform.CallTIRRewrite(),
    ]

    def calls(body):
        script = AllReduceInPlace("sum")(tvm.transform.Sequential(lowering)(module(body)))["main"].script()
        (line,) = [line for line in script.splitlines() if 'call_packed("sum"' in line]
        return line.partition('"sum", ')[2].rstrip(")").split(", ")[:2]

    def alone(emit, x):
        term = emit(op.exp(x))
        return op.exp(emit(relax.call_dps_packed("sum", (term,), out_ty=term.ty)))

    def read(emit, x):
        term = emit(op.exp(x))
        return op.add(emit(relax.call_dps_packed("sum", (term,), out_ty=term.ty)), term)

    assert len(set(calls(alone))) == 1
    assert len(set(calls(read))) == 2
