"""Reading and writing at positions that tensors give: PyTorch's numbers, and what comes of positions outside."""

import math

import pytest
import torch
import torch.nn.functional as F

from stof_tvm.frontend import import_model
from stof_tvm.frontend.operators.indexing import writing as indexing_writes
from tests.models.running import compile_imported
from tests.stof_tvm.frontend.batches import Functions, errors, message

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def assigned(x, y, i, n, j):
    out = x.clone()
    out[:, i] = y[:, :3]
    out[:, i, 0] += 1
    out[:, :, n] = 0.0
    out[1:, n, ...] = y[1:, :3]
    out[0] = i.sum()
    return out


def assigned_by_mask(x, y, i, n, j):
    out = x.clone()
    out[x > 0.5] = 0.0
    out[torch.tensor([True, False, True, True])] = y[:3]
    out[x[:, :, 0] > 0] = y[0, 0]
    return out


# x, y float (4, 6, 8); i int64 (3,) in 0..3; n with negative and equal numbers; j int64 (4, 4, 8) in 0..5, repeating
READS = {
    "one": lambda x, y, i, n, j: (x[:, n], x[..., n], x[n, None], (x * 9).long()[:, n], (x > 0)[n]),
    "two": lambda x, y, i, n, j: (x[i, n], x[i, :, n], x[:, i, n], x[i[:, None], n], (x > 0)[i, n]),
    "apart": lambda x, y, i, n, j: x[n, None, ..., i],
    "index_select": lambda x, y, i, n, j: (x.index_select(1, i), x[0, 0, 0].index_select(0, i[:1])),
    "gather": lambda x, y, i, n, j: (x.gather(1, j), x.gather(-1, j[:2]), (x * 9).int().gather(1, j)),
    "take": lambda x, y, i, n, j: (x.take(n), torch.take_along_dim(x, n[None, :, None], 1), torch.take_along_dim(x, i)),
    "one_hot": lambda x, y, i, n, j: F.one_hot(i, 4),
}
WRITES = {
    "index_put": lambda x, y, i, n, j: (x.index_put((n,), y[0]), x.index_put((i, n.abs()), y[0, :3])),
    "index_put sum": lambda x, y, i, n, j: (x.index_put((n,), y[:3], True), x.index_put((i, n), y[0, 0], True)),
    "assigned": assigned,
    "assigned by mask": assigned_by_mask,
    "masked_scatter": lambda x, y, i, n, j: x.masked_scatter(x > 0, y),
    "put": lambda x, y, i, n, j: (x.put(i, y[0, 0, :3]), x.put(n, y[0, 0, :3], True)),
    "index_copy": lambda x, y, i, n, j: (x.index_copy(1, i, y[:, :3]), x.index_copy(-1, i, y[..., :3])),
    "index_copy int": lambda x, y, i, n, j: (x * 9).long().index_copy(0, i, (y[:3] * 9).long()),
    "index_add": lambda x, y, i, n, j: x.index_add(1, n.abs(), y[:, :3], alpha=2),
    "index_add half": lambda x, y, i, n, j: (x * 4).round().half().index_add(1, i * 0, y[:, :3].half() * 0 + 1),
    "index_fill": lambda x, y, i, n, j: (x.index_fill(2, n, 3.0), (x > 0).index_fill(1, i, True)),
    "index_reduce": lambda x, y, i, n, j: x.index_reduce(1, n.abs(), y[:, :3], "mean"),
    "scatter": lambda x, y, i, n, j: (x.scatter(1, j[:, :1], y), x.scatter(1, j, 1.5)),
    "scatter of halves": lambda x, y, i, n, j: x.bfloat16().scatter(1, j[:, :1], y.bfloat16()),
    "scatter reduce=": lambda x, y, i, n, j: (
        x.scatter(1, j, y, reduce="add"),
        x.scatter(1, j, 2.0, reduce="multiply"),
    ),
    "scatter_add": lambda x, y, i, n, j: x.scatter_add(1, j, y),
} | {
    f"scatter_reduce {reduce} {own}": lambda x, y, i, n, j, reduce=reduce, own=own: (
        x.scatter_reduce(1, j[:3], y, reduce, include_self=own),
        (x * 9).to(torch.int8).scatter_reduce(1, j[:, :, :5], (y * 9).to(torch.int8), reduce, include_self=own),
    )
    for reduce in REDUCTIONS
    for own in (True, False)
}


def inputs():
    torch.manual_seed(0)
    i, n = torch.tensor([0, 2, 1]), torch.tensor([-1, 2, 2])
    j = (torch.arange(128).reshape(4, 4, 8) * 7) % 6
    return torch.randn(4, 6, 8), torch.randn(4, 6, 8), i, n, j


@pytest.mark.parametrize("functions", [READS, WRITES], ids=["reads", "writes"])
def test_numbers(functions):
    assert {name: error for name, error in errors(functions, inputs()).items() if error > 1e-5} == {}


def test_the_last_writer_by_comparing_and_by_the_kernel_is_the_same(monkeypatch):
    monkeypatch.setattr(indexing_writes, "COMPARED", 0)
    some = {name: WRITES[name] for name in ("index_put", "index_copy int", "index_fill")}
    assert max(errors(some, inputs()).values()) == 0.0


def test_a_position_outside_is_read_as_nan_and_writes_it():
    """PyTorch raises; expected are the results with the poison at the place of the nearest position."""
    x, i = torch.randn(5, 3), torch.tensor([0, 5, -6])
    model = Functions(
        [
            lambda x, i: x[i],
            lambda x, i: x.index_copy(0, i, x[:3]),
            lambda x, i: x.scatter_add(0, i[:, None].expand(3, 3), x),
            lambda x, i: (x * 9).long()[i, i.clamp(0, 2)],
            lambda x, i: x.gather(0, i[:, None]),
        ]
    )
    example = torch.zeros(3, dtype=torch.int64)
    read, copied, added, integers, gathered = compile_imported(import_model(model, (x, example)))(x, i)
    torch.testing.assert_close(read[0], x[0])
    assert read[1:].isnan().all() and gathered[1:].isnan().all()
    for result in (copied, added):
        assert result[4].isnan().all() and result[0].isnan().all()
        torch.testing.assert_close(result[1:4], x[1:4])
    assert integers.tolist()[1:] == [torch.iinfo(torch.int64).min] * 2


BAGS = {
    f"{mode} {padding} {last}": lambda w, i, o, p, x, b, mode=mode, padding=padding, last=last: F.embedding_bag(
        i, w, o, mode=mode, padding_idx=padding, include_last_offset=last
    )
    for mode, padding, last in (
        *(("sum", None, False), ("sum", 1, True), ("mean", 1, False), ("mean", None, True), ("max", 1, True)),
        ("max", None, False),
    )
} | {
    "weights": lambda w, i, o, p, x, b: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
    "rows": lambda w, i, o, p, x, b: F.embedding_bag(i[:6].reshape(2, 3), w),
    "histc": lambda w, i, o, p, x, b: (torch.histc(x, 7, -1, 1), torch.histc(w, 5), torch.histc(w * 0, 4)),
    "searchsorted": lambda w, i, o, p, x, b: (torch.searchsorted(b, x), torch.searchsorted(b, 0.25)),
    "searched behind NaN": lambda w, i, o, p, x, b: torch.searchsorted(x.sort().values, x),
    "searched out of order": lambda w, i, o, p, x, b: torch.searchsorted(x, b, right=True),
    "rows searched": lambda w, i, o, p, x, b: torch.searchsorted(w.sort().values, w.flip(1), side="right"),
    "bucketize": lambda w, i, o, p, x, b: (torch.bucketize(x, b, right=True, out_int32=True), torch.bucketize(i, b)),
}


def test_bags_and_counts():
    torch.manual_seed(0)
    i, offsets = torch.tensor([3, 1, 1, 9, 0, 2, 7]), torch.tensor([0, 2, 2, 7])
    values = torch.tensor([math.nan, math.inf, -1.0, 0.0, 0.5, -math.inf, 0.25, 2.0])
    bounds = torch.tensor([-1.0, 0.0, 0.0, 0.5, math.inf])
    given = torch.randn(10, 5), i, offsets, torch.rand(7), values, bounds
    assert {name: error for name, error in errors(BAGS, given).items() if error > 1e-5} == {}


@pytest.mark.parametrize(
    "function",
    [
        torch.nonzero,
        torch.unique,
        lambda i: torch.bincount(i, minlength=4),
        lambda i: i.masked_select(i > 0),
        lambda i: torch.repeat_interleave(i, i),
        lambda i: i[i > 1],
    ],
)
def test_shapes_that_depend_on_values_are_refused(function):
    text = message(function, torch.tensor([2, 1, 3]))
    assert text.startswith("UnsupportedError") and "shape" in text and "depends on" in text
