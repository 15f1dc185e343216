"""What cannot be a part of an engine: the error names the attention, the rule, and what about it."""

from dataclasses import dataclass, field

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.rules.traced import TracedRule
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rules.rule_models import EVERY_RULE, LENGTH, Attend, tensors
from tir_kernels.errors import ExportError, MaskError, UnsupportedError


def some(q, k):
    return torch.ones(1, 1, -(-q.shape[2] // 64), -(-k.shape[2] // 64), dtype=torch.bool)


def by_value(q, k):
    return some(q, k) if q.sum() > 0 else ~some(q, k)


def number(q, k):
    return some(q, k) & (torch.arange(3) < int(q.sum().item()))


def one_block(q, k):
    return some(q, k)[..., :1]


def floats(q, k):
    return some(q, k).float()


def decomposed(q, k):
    return some(q, k) & (torch.linalg.qr(q[0, 0, :16])[0].sum() > 0)


def random(q, k):
    return some(q, k) & (torch.rand(3) > 0.5)


def in_place(q, k):
    return some(q.mul_(2), k)


def wrong(q, k):
    return q.blocks


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (by_value, ExportError, "decides by a tensor's values"),
        (number, ExportError, "data-dependent"),
        (one_block, MaskError, r"gave a block map of shape \(1, 1, 3, 1\)"),
        (floats, MaskError, "gave torch.float32"),
        (decomposed, UnsupportedError, "aten.linalg_qr.default"),
        (random, UnsupportedError, "aten.rand.default"),
        (in_place, UnsupportedError, "writes into q"),
        (wrong, ExportError, "no attribute 'blocks'"),
    ],
)
def test_what_is_no_part_of_an_engine(function, kind, words):
    with pytest.raises(kind, match=rf"(?s)attention .*rule\({function.__name__}\).*{words}"):
        stof_tvm.build(Attend(), QUICK_LLVM, tensors(), masks.runtime.rule(function))


def test_equal_operands_are_traced_once():
    rule, known = EVERY_RULE["top_blocks"], {}
    shapes = (1, 4, LENGTH, 16), (1, 2, LENGTH, 16)
    mod = TracedRule(rule, "a", known).traced(*shapes, "float32")
    assert TracedRule(rule & masks.causal(), "b", known).traced(*shapes, "float32") is mod
    assert TracedRule(rule, "a", known).traced(*shapes, "float16") is not mod
    assert [list(map(int, x.ty.shape)) for x in mod["main"].params] == [list(x) for x in shapes]


@dataclass(frozen=True)
class Nearest:
    """Two of these are equal whatever they weigh."""

    weights: torch.Tensor = field(compare=False)

    def __call__(self, q, k):
        return ((q * self.weights)[:, :, ::32] @ k[:, :, ::32].mT).sum((0, 1), keepdim=True) > 0


def test_functions_that_compare_equal_are_not_taken_for_one():
    shapes = (1, 2, LENGTH, 16), (1, 2, LENGTH, 16)
    rules = [masks.runtime.rule(Nearest(torch.tensor(sign)), block=32) for sign in (1.0, -1.0)]
    known = {}
    mods = [TracedRule(rule, "a", known).traced(*shapes, "float32") for rule in (*rules, rules[0])]
    assert rules[0].function == rules[1].function and mods[0] is mods[2] is not mods[1]


def test_a_function_without_a_hash_is_built():
    kind = dataclass(type("Ahead", (), {"__call__": lambda self, q, k: some(q, k)}))
    assert kind.__hash__ is None
    stof_tvm.build(Attend(), QUICK_LLVM, tensors(), masks.runtime.rule(kind()))
