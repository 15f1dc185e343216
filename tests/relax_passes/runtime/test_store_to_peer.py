"""Exchanges of two ranks that store in each other's memory: both ranks' programs run side by side, as threads."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script import tirx as T

from relax_passes.parallel.placement import BoxFunctions, Ranks
from relax_passes.pipeline import run_pipeline
from relax_passes.runtime.store_to_peer import StoreToPeer, boxes_of
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.families import BertLike, GptLike, example_calls
from tests.models.quick_llvm import QUICK_LLVM, run_linked
from tests.tir_kernels.attention.cuda_emulator import aligned

EXCHANGE = "stof.test.exchange"
WAIT_S = 20  # of a rank for the other, before the test fails


class Memory:
    """The boxes of two ranks, and what the programs did with them."""

    def __init__(self):
        self.boxes = [[], []]
        self.meeting = threading.Barrier(2, timeout=WAIT_S)
        self.used = [[], []]


class Mailboxes:
    """Boxes of one of the ranks.  A rank comes late to every meeting, now one and now the other."""

    def __init__(self, memory: Memory, rank: int):
        self.memory, self.rank, self.random = memory, rank, random.Random(rank)

    def boxes(self, count, nbytes):
        self.memory.boxes[self.rank] = [aligned(np.full(nbytes, 255, np.uint8)) for _ in range(count)]
        functions = BoxFunctions(*(f"stof.test.boxes.{self.rank}.{field}" for field in BoxFunctions._fields))
        for field, name in functions._asdict().items():
            tvm.register_global_func(name, getattr(self, field), override=True)
        return functions

    def _box(self, rank, number, shape, dtype):
        memory = self.memory.boxes[rank][number]
        return memory.view(str(dtype))[: int(np.prod(shape))].reshape(tuple(shape))

    def inbox(self, number, shape, dtype):
        self.memory.used[self.rank].append("inbox")
        return tvm.runtime.from_dlpack(self._box(self.rank, number, shape, dtype))

    def outbox(self, number, shape, dtype):
        return tvm.runtime.from_dlpack(self._box(1 - self.rank, number, shape, dtype))

    def arrive(self):
        self.memory.used[self.rank].append("arrive")
        self.memory.meeting.wait()
        if self.random.random() < 0.5:
            time.sleep(0.002)

    def send(self, tensor, number):
        self.memory.used[self.rank].append("send")
        self._box(1 - self.rank, number, tensor.shape, tensor.dtype)[...] = tensor.numpy()
        self.memory.meeting.wait()

    def receive(self, tensor, number):
        self.memory.used[self.rank].append("receive")
        tensor.copyfrom(self._box(self.rank, number, tensor.shape, tensor.dtype).copy())


def in_pair(functions):
    """The results of a function of each rank, which run at once."""
    with ThreadPoolExecutor(2) as threads:
        return [each.result() for each in [threads.submit(function) for function in functions]]


def programs(mod, memory: Memory) -> list:
    """The programs of both ranks from an imported module."""
    libraries = []
    for rank in range(2):
        ranks = Ranks(rank, 2, "stof.test.sum", exchange=EXCHANGE, mailboxes=Mailboxes(memory, rank))
        lowered = run_pipeline(mod, QUICK_LLVM, SiteMasks(None), ranks=ranks)
        assert EXCHANGE not in lowered["main"].script()
        with QUICK_LLVM:
            libraries.append(run_linked(relax.build(lowered, QUICK_LLVM, relax_pipeline=None))["main"])
    return libraries


@pytest.mark.parametrize(
    ("kind", "name", "layers"), [(BertLike, "bert", 1), (GptLike, "gpt", 2)], ids=["2 exchanges", "4 exchanges"]
)
def test_models_of_two_ranks_compute_what_pytorch_does(kind, name, layers):
    torch.manual_seed(0)
    model, inputs = kind(layers=layers).eval(), example_calls()[name][1]
    memory, imported = Memory(), import_model(model, inputs)
    mains = programs(imported.mod, memory)
    for number in range(4):  # boxes are used again
        ids = (inputs[0] + number) % 50
        flat = imported.signature.flatten((ids, *inputs[1:]), {})
        with torch.no_grad():
            expected = model(ids, *inputs[1:])
        expected = expected if isinstance(expected, torch.Tensor) else expected[0]
        for out in in_pair([lambda main=main: main(*flat) for main in mains]):
            first = out if isinstance(out, torch.Tensor) else out[0]
            torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    for used in memory.used:
        assert used.count("arrive") + used.count("send") == 4 * 2 * layers
        assert "receive" not in used


def times(factor: float):
    """A kernel that multiplies (4, 8) by a number, which its name does not tell."""

    @T.prim_func
    def kernel(x: T.Buffer((4, 8), "float32"), out: T.Buffer((4, 8), "float32")):
        for i, j in T.grid(4, 8):
            out[i, j] = x[i, j] * T.float32(factor)

    return kernel.without_attr("global_symbol")


def chain(count: int, factor: float, early: bool = False) -> tvm.IRModule:
    """So many times: x = its term + the other rank's, where a rank's term is x times its factor.

    `early` computes all terms of the first x before the first exchange, and adds up what the ranks have.
    """
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            kernel, value = builder.add_func(times(factor), "times"), x
            terms = [builder.emit(relax.call_tir(kernel, (x,), x.ty)) for _ in range(count * early)]
            for term in terms:
                other = builder.emit(relax.call_dps_packed(EXCHANGE, (term,), out_ty=x.ty))
                value = builder.emit(relax.op.add(value, builder.emit(relax.op.add(term, other))))
            for _ in range(count * (not early)):
                term = builder.emit(relax.call_tir(kernel, (value,), x.ty))
                other = builder.emit(relax.call_dps_packed(EXCHANGE, (term,), out_ty=x.ty))
                value = builder.emit(relax.op.add(term, other))
            out = builder.emit_output(relax.op.tanh(value))
        builder.emit_func_output(out)
    return builder.finalize()


LOWERING = [
    relax.transform.LegalizeOps(),
    relax.transform.ToNonDataflow(),
    relax.transform.RemovePurityChecking(),
    relax.transform.CallTIRRewrite(),
]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_terms_go_from_kernel_to_kernel(count):
    factors, memory, mains = (0.25, 0.5), Memory(), []
    for rank, factor in enumerate(factors):
        ranks = Ranks(rank, 2, "", "", EXCHANGE, Mailboxes(memory, rank))
        mod = tvm.transform.Sequential([*LOWERING, StoreToPeer(ranks)])(chain(count, factor))
        # The kernel is one, and stores twice everywhere.
        assert "times_sent" in mod["main"].script() and "cls.times(" not in mod["main"].script()
        mains.append(run_linked(relax.build(mod, QUICK_LLVM))["main"])
    assert len(memory.boxes[0]) == {1: 1, 2: 2, 4: 2}.get(count, 3)
    for _ in range(20):
        x = torch.randn(4, 8)
        for out in in_pair([lambda main=main: main(x) for main in mains]):
            torch.testing.assert_close(out, torch.tanh(x * sum(factors) ** count))
    for used in memory.used:
        assert used.count("arrive") == 20 * (2 if count == 1 else count) and not {"send", "receive"} & {*used}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_term_that_is_computed_too_early_is_copied(count):
    """Stored at once, it would overwrite what the other rank reads in the call before."""
    factors, memory, mains = (0.25, 0.5), Memory(), []
    for rank, factor in enumerate(factors):
        ranks = Ranks(rank, 2, "", "", EXCHANGE, Mailboxes(memory, rank))
        mod = tvm.transform.Sequential([*LOWERING, StoreToPeer(ranks)])(chain(count, factor, early=True))
        assert mod["main"].script().count(".send") == count - 1  # all but the first
        mains.append(run_linked(relax.build(mod, QUICK_LLVM))["main"])
    for _ in range(20):
        x = torch.randn(4, 8)
        for out in in_pair([lambda main=main: main(x) for main in mains]):
            torch.testing.assert_close(out, torch.tanh(x * (1 + count * sum(factors))))


@pytest.mark.parametrize("exchanges", range(9))
def test_neighbours_have_different_boxes(exchanges):
    boxes = boxes_of(exchanges)
    assert len(boxes) == exchanges
    if exchanges > 1:
        assert all(here != after for here, after in zip(boxes, [*boxes[1:], boxes[0]]))


def lowered(body) -> str:
    """The bindings of "main" after the pass, as text; `body(emit, exchange, x)` gives its result."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 8), "float32"))

    def exchange(term):
        return builder.emit(relax.call_dps_packed(EXCHANGE, (term,), out_ty=term.ty))

    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, exchange, x))
        builder.emit_func_output(out)
    pass_ = StoreToPeer(Ranks(0, 2, "", "", EXCHANGE, Mailboxes(Memory(), 0)))
    return tvm.transform.Sequential([*LOWERING, pass_])(builder.finalize())["main"].script()


def test_a_box_that_is_read_after_the_next_exchange_is_copied():
    op = relax.op

    def late(emit, exchange, x):
        first = emit(op.exp(x))
        early = exchange(first)
        second = emit(op.tanh(emit(op.add(first, x))))
        return op.add(emit(op.add(second, exchange(second))), early)

    def in_time(emit, exchange, x):
        first = emit(op.exp(x))
        second = emit(op.tanh(emit(op.add(first, exchange(first)))))
        return op.add(second, exchange(second))

    assert lowered(late).count("0.receive") == 1 and lowered(late).count("0.inbox") == 1
    assert lowered(in_time).count("0.receive") == 0 and lowered(in_time).count("0.inbox") == 2


def test_what_a_program_returns_is_no_box():
    text = lowered(lambda emit, exchange, x: exchange(emit(relax.op.exp(x))))
    assert "0.receive" in text and "0.inbox" not in text


def test_a_term_that_no_kernel_of_the_program_computes_is_copied():
    text = lowered(lambda emit, exchange, x: relax.op.exp(exchange(x)))
    assert "0.send" in text and "0.outbox" not in text


def test_a_term_that_is_changed_in_place_is_copied():
    """Two calls have its memory before the exchange: the first one's result is not the term."""

    def body(emit, exchange, x):
        term = emit(relax.call_dps_packed("stof.test.fill", (x,), out_ty=x.ty))
        return relax.op.exp(exchange(term))

    text = lowered(body)
    assert "0.send" in text and "0.outbox" not in text


def test_without_mailboxes_nothing_changes():
    mod = tvm.IRModule()
    assert StoreToPeer(Ranks(0, 2, "sum", exchange=EXCHANGE))(mod) == mod
