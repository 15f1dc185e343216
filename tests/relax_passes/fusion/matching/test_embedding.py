"""Groups that gather rows of tables: which problem they are, that it computes the same, and why others are none."""

import numpy as np
import pytest
from tvm import relax

from relax_passes.fusion.matching.segment_problem import NoProblem, match_specific
from relax_passes.fusion.operators import OperatorGraph
from tests.relax_passes.fusion.matched_values import assert_match_computes
from tests.relax_passes.fusion.modules import function_of, norm, weight
from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.rows.embedding import Table

op = relax.op
BATCH, LENGTH, WIDTH, WORDS = 2, 6, 16, 11
IDS = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH))


def ids(name="ids", shape=(BATCH, LENGTH), dtype="int64"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def gathered(emit, index, rows=WORDS, shape=(BATCH, LENGTH), seed=0):
    """As the importer writes nn.Embedding: indices cast and flattened, the rows in the indices' shape again."""
    flat = emit(op.reshape(emit(op.astype(index, "int32")), (int(np.prod(shape)),)))
    rows = emit(op.take(weight(rows, WIDTH, seed=seed), flat, axis=0, mode="nan"))
    return emit(op.reshape(rows, (*shape, WIDTH)))


def test_words_positions_and_types_then_a_norm_as_in_bert():
    """Positions and types are known at compile time: one table, again for each sequence."""
    x = ids()

    def body(emit):
        total = emit(op.add(gathered(emit, x), weight(1, LENGTH, WIDTH)))
        return norm(emit, emit(op.add(total, weight(WIDTH))))

    match = assert_match_computes(function_of([x], body), [IDS])
    assert match.problem.tables == (Table(WORDS), Table(LENGTH, LENGTH))
    assert (match.problem.index_dtype, match.problem.norm) == ("int64", Norm("layer_norm", 1e-5))


def test_words_alone():
    x = ids()
    match = assert_match_computes(function_of([x], lambda emit: gathered(emit, x)), [IDS])
    assert match.problem.tables == (Table(WORDS),) and match.problem.norm is None


def test_types_and_positions_of_a_call():
    x, types, positions = ids(), ids("types"), ids("positions", (1, LENGTH))

    def body(emit):
        total = emit(op.add(gathered(emit, x), gathered(emit, types, 2, seed=1)))
        return norm(emit, emit(op.add(total, gathered(emit, positions, 9, (1, LENGTH), seed=2))))

    values = [IDS, IDS % 2, np.arange(LENGTH)[None] + 2]
    match = assert_match_computes(function_of([x, types, positions], body), values)
    assert match.problem.tables == (Table(WORDS), Table(2), Table(9, LENGTH))


def test_a_sum_that_is_read_again_is_kept():
    """Pre-norm models go on with the sum."""
    x = ids()

    def body(emit):
        total = emit(op.add(gathered(emit, x), weight(LENGTH, WIDTH)))
        return relax.Tuple([norm(emit, total), total])

    match = assert_match_computes(function_of([x], body), [IDS])
    assert match.problem.keeps_sum


def test_a_table_for_every_token_of_the_batch():
    x = ids()
    body = lambda emit: emit(op.add(gathered(emit, x), weight(BATCH, LENGTH, WIDTH)))
    assert assert_match_computes(function_of([x], body), [IDS]).problem.tables[1] == Table(BATCH * LENGTH)


def reason(params, body) -> str:
    with pytest.raises(NoProblem) as error:
        match_specific(OperatorGraph(function_of(params, body)))
    return str(error.value)


def test_what_is_no_sum_of_rows_says_why():
    x, y = ids(), relax.Var("y", relax.TensorType((BATCH, LENGTH, WIDTH), "float32"))
    assert "known at compile time" in reason([x, y], lambda emit: emit(op.add(gathered(emit, x), y)))
    per_sequence = weight(BATCH, 1, WIDTH)
    assert "is broadcast" in reason([x], lambda emit: emit(op.add(gathered(emit, x), per_sequence)))
    squared = lambda emit: emit(op.multiply(gathered(emit, x), gathered(emit, x, seed=1)))
    assert "known at compile time" in reason([x], squared)
    clipped = lambda emit: emit(op.take(weight(WORDS, WIDTH), x, axis=0, mode="clip"))
    assert "mode clip" in reason([x], clipped)
    columns = lambda emit: emit(op.take(weight(WIDTH, WIDTH), x, axis=1, mode="nan"))
    assert "along dimension 1" in reason([x], columns)


def test_a_number_that_is_added_is_no_table():
    x = ids()
    for number in (relax.const(1.5, "float32"), relax.const(np.ones(1, "float32"))):
        assert "is broadcast" in reason([x], lambda emit: emit(op.add(gathered(emit, x), number)))
