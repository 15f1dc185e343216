"""Random programs of rows: whatever selection reads them, in whatever way, the results are the same."""

import random

import numpy as np
import pytest
from tvm import relax

from tests.relax_passes.read_rows.programs import B, H, S, module, narrowed, product_rows, variable, weight
from tests.relax_passes.read_rows.test_compute_read_rows import STEPS, linear

op = relax.op
SELECTIONS = {
    "the first": lambda emit, x, i: emit(op.take(x, relax.const(0, "int64"), axis=1, mode="clip")),
    "every third": lambda emit, x, i: emit(op.strided_slice(x, [1], [0], [S], [3])),
    "three in another order": lambda emit, x, i: emit(
        op.take(x, relax.const(np.array([4, 0, 2]), "int64"), axis=1, mode="nan")
    ),
    "one that is given": lambda emit, x, i: emit(op.take(x, emit(op.strided_slice(i, [0], [0], [1])), axis=1)),
    "two that are given": lambda emit, x, i: emit(op.take(x, i, axis=1, mode="nan")),
    "one of each entry": lambda emit, x, i: emit(
        op.gather_elements(x, emit(op.broadcast_to(emit(op.reshape(i, (B, 1, 1))), (B, 1, H))), axis=1)
    ),
}


@pytest.mark.parametrize("seed", range(18))
def test_results_stay(seed):
    numbers = random.Random(seed)
    select = [*SELECTIONS.values()][seed % len(SELECTIONS)]
    steps = numbers.sample(sorted(STEPS), 3)
    is_residual = [numbers.random() < 0.6 for _ in steps]

    def body(emit, x, i):
        for number, (name, adds) in enumerate(zip(steps, is_residual)):
            y = STEPS[name](emit, linear(emit, x, seed=number))
            x = emit(op.add(x, y)) if adds else y
        return linear(emit, select(emit, emit(op.add(x, weight(S, H))), i))

    mod = module(body, variable("x", B, S, H), variable("i", B, dtype="int64"))
    before, after = product_rows(mod), product_rows(narrowed(mod))
    assert len(after) == len(before) and max(after) < B * S
