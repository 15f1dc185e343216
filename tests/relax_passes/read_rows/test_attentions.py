"""Attentions have the queries that are read, with their rows of every mask, or stay whole."""

import functools

import pytest
import torch

import stof_tvm
from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import Bindings, shape_of
from relax_passes.pipeline import run_pipeline
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.read_rows.layers import BATCH, HEADS, LENGTH, SAME_FOR_ALL, SELECTIONS, WIDTH, Reader
from tests.relax_passes.read_rows.programs import product_rows

WINDOW = masks.sliding_window(4) | masks.global_tokens([5])  # not by distance: all keys stay
OWN = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.4
OWN |= torch.eye(LENGTH, dtype=torch.bool)
MODELS = {
    "bidirectional": dict(),
    "causal, grouped": dict(causal=True, kv_heads=2),
    "a mask of its own": dict(own_mask=OWN),
    "a bias of its own": dict(own_mask=torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))),
}


def inputs(batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, LENGTH, WIDTH, generator=generator)
    return x, torch.tensor([7, 2, 11])[:batch]


def last_attention(model, mask=None, args=None, **given):
    """The last attention after the pass, and the rows of the products."""
    imported = import_model(model.eval(), args or inputs(), {})
    mod = run_pipeline(imported.mod, QUICK_LLVM, SiteMasks(mask, takes_rules=True), until="read_rows", **given)
    calls = [match_attention(mod, value) for value in Bindings(mod["main"]).values.values()]
    return [call for call in calls if call is not None][-1], product_rows(mod)


CAUSAL = "causal, grouped"
EACH = [(CAUSAL, how) for how in SELECTIONS]
OTHERS = [(name, how) for name in MODELS if name != CAUSAL for how in ("some last rows", "gather")]


@pytest.mark.parametrize(("name", "how"), EACH + OTHERS)
def test_results_are_those_of_pytorch(name, how):
    select, (_, count) = SELECTIONS[how]
    engine = stof_tvm.build(Reader(select, **MODELS[name]).eval(), QUICK_LLVM, inputs())
    report = engine.report()
    assert report.verification.result == "passed"
    assert [site.shape.q_len for site in report.rewritten] == [LENGTH, count]
    assert f"computed for {count} of its {LENGTH} queries: nothing reads the others" in report.rewritten[-1].notes


GIVEN = [*((2, *case) for case in EACH), *((1, *case) for case in OTHERS), (1, CAUSAL, "indexing by batch and row")]


@pytest.mark.parametrize(("batch", "name", "how"), GIVEN)
def test_a_given_mask_has_the_rows_that_are_read(name, batch, how):
    select, (first, count) = SELECTIONS[how]
    engine = stof_tvm.build(Reader(select, **MODELS[name]).eval(), QUICK_LLVM, inputs(batch), WINDOW)
    report = engine.report()
    assert report.verification.result == "passed"
    site = report.rewritten[-1]
    is_whole = first is None and batch > 1 and how not in SAME_FOR_ALL  # no kernel has rows for each batch entry
    assert site.shape.q_len == (LENGTH if is_whole else count)
    assert site.first_row == first
    assert site.shape.has_positions == (first is None and not is_whole)


def test_the_density_is_that_of_the_rows():
    engine = stof_tvm.build(Reader(lambda x, index: x[:, 6:8]).eval(), QUICK_LLVM, inputs(), WINDOW)
    whole, part = engine.report().rewritten
    keep = WINDOW.dense(LENGTH, LENGTH)
    assert whole.density == pytest.approx(float(keep.float().mean()))
    assert part.density == pytest.approx(float(keep[6:8].float().mean()))


@pytest.mark.parametrize("how", ["the first row", "gather"])
def test_padding_that_is_given_at_run_time(how):
    padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 8:] = False
    model = Reader(SELECTIONS[how][0]).eval()
    engine = stof_tvm.build(model, QUICK_LLVM, (*inputs(), padding))
    assert [site.shape.q_len for site in engine.report().rewritten] == [LENGTH, 1]
    x, index = inputs()
    for rows in (index, index.flip(0) // 2):
        assert torch.allclose(engine(x, rows, padding), model(x, rows, padding), atol=2e-6)


@functools.cache
def with_engine(how, causal):
    """A model and its engine, for calls with several rows."""
    model = Reader(SELECTIONS[how][0], causal=causal).eval()
    return model, stof_tvm.build(model, QUICK_LLVM, inputs())


@pytest.mark.parametrize("how", ["index_select", "indexing by batch and row", "gather", "take_along_dim"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_change_from_call_to_call(how, causal):
    model, engine = with_engine(how, causal)
    for rows in ([0, 11], [5, 6], [11, 0]):
        x, index = inputs()[0], torch.tensor(rows)
        assert torch.allclose(engine(x, index), model(x, index), atol=2e-6)


@pytest.mark.parametrize("how", ["index_select", "indexing by batch and row", "gather"])
@pytest.mark.parametrize("row", [2 * LENGTH, -LENGTH - 1, 1 << 40])
def test_a_row_that_there_is_not_is_nan(how, row):
    _, engine = with_engine(how, causal=True)
    x = inputs()[0]
    out = engine(x, torch.tensor([row, 3]))
    assert out[0].isnan().all()
    assert how in SAME_FOR_ALL or out[1].isfinite().all()


def test_causality_of_some_rows_needs_no_mask_where_it_can_be_said():
    def of(first, count):
        return last_attention(Reader(lambda x, index: x[:, first : first + count], causal=True))[0]

    assert [of(*rows).causal for rows in ((0, 3), (LENGTH - 3, 3), (LENGTH - 1, 1))] == ["top-left", "bottom-right", ""]
    inside = of(4, 2)
    assert inside.causal == ""
    assert inside.mask.value.numpy().sum(-1).tolist() == [[[5, 6]]]
    assert of(LENGTH - 1, 1).mask is None


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (None, {"replaceable": []}),  # masks of all rows may come later
        (masks.runtime.xattention(stride=16, mass=0.9), {}),  # a rule looks at all queries
        (masks.sliding_tile((3, 4), (3, 2), (3, 2), order="row-major"), {}),  # tokens may be put in another order
    ],
)
def test_what_is_decided_by_all_rows_keeps_an_attention_whole(mask, given):
    attention, rows = last_attention(Reader(lambda x, index: x[:, 0]), mask, **given)
    assert shape_of(attention.q)[2] == LENGTH
    assert rows[-4:] == [BATCH] * 4  # the projection behind it, the MLP and the head


class Folded(torch.nn.Module):
    """Each row is two queries, or each entry of the batch is two of the attention's."""

    def __init__(self, shape, select):
        super().__init__()
        self.linear, self.shape, self.select = torch.nn.Linear(WIDTH, WIDTH), shape, select

    def forward(self, x, index):
        y = self.linear(x).reshape(self.shape)
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).reshape(x.shape)
        return self.select(self.linear(y), index)


@pytest.mark.parametrize("shape", [(BATCH, 1, 2 * LENGTH, WIDTH // 2), (2 * BATCH, 1, LENGTH // 2, WIDTH)])
@pytest.mark.parametrize("how", ["the last row", "gather"])
def test_rows_that_are_not_one_query_each_keep_an_attention_whole(shape, how):
    model = Folded(shape, SELECTIONS[how][0])
    attention, _ = last_attention(model)
    assert shape_of(attention.q) == shape
    assert stof_tvm.build(model, QUICK_LLVM, inputs()).report().verification.result == "passed"


def test_two_selections_leave_the_layer_whole():
    attention, rows = last_attention(Reader(lambda x, index: x[:, 0] + x[:, -1]))
    assert shape_of(attention.q)[2] == LENGTH
    assert rows[-2] == BATCH * LENGTH


def test_ranks_that_share_a_sequence_have_none_of_this():
    attention, _ = last_attention(Reader(lambda x, index: x[:, 0]), shared=lambda call: "stof.test.none")
    assert shape_of(attention.q)[2] == LENGTH


@pytest.mark.parametrize(
    "select",
    [
        lambda x, index: x[torch.tensor([1, 0]), index],  # entries in another order
        lambda x, index: x[torch.arange(2)[:, None], index[None]],  # rows of every entry
        lambda x, index: x.flatten(0, 1)[index],  # rows of the first entry
    ],
)
def test_other_rows_of_a_merged_axis_are_not_taken_for_one_of_each_entry(select):
    model = Reader(select, causal=True).eval()
    assert shape_of(last_attention(model)[0].q)[2] == LENGTH
    engine = stof_tvm.build(model, QUICK_LLVM, inputs())
    x = inputs()[0]
    for rows in ([7, 2], [0, 11], [-1, -12]):
        assert torch.allclose(engine(x, torch.tensor(rows)), model(x, torch.tensor(rows)), atol=2e-6)


LAST_EMPTY, FIRST_KEYS = OWN[0, 0].clone(), torch.ones(LENGTH, LENGTH, dtype=torch.bool)
LAST_EMPTY[-1], FIRST_KEYS[-1, 3:] = False, False
OTHER_KEYS = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
OTHER_KEYS[-1] = ~FIRST_KEYS[-1]


@pytest.mark.parametrize(
    ("own", "given"), [(LAST_EMPTY, None), (None, LAST_EMPTY), (FIRST_KEYS, OTHER_KEYS)], ids=["own", "given", "both"]
)
def test_rows_that_keep_no_key_are_computed_with_others(own, given):
    """A mask of these rows alone would keep nothing, which is an error."""
    engine = stof_tvm.build(Reader(SELECTIONS["the last row"][0], own_mask=own).eval(), QUICK_LLVM, inputs(), given)
    report = engine.report()
    assert report.verification.result == "passed"
    assert [site.shape.q_len for site in report.rewritten] == [LENGTH, LENGTH]
