"""Writes at the places that a sort gave: at once where each is written once, and one after another elsewhere."""

import pytest
import torch

from stof_tvm.frontend import import_model
from tests.models.running import compile_imported

ROWS = 9


def inverse(x):
    order = x.sort().indices
    places = torch.empty_like(order)
    places[order] = torch.arange(ROWS)
    return places


def sorted_back(x):
    """Rows of a matrix, at the places of an argsort."""
    order = x.argsort()
    out = torch.zeros(ROWS, 4)
    out[order.clone()] = x[order][:, None] * torch.ones(4)
    return out


def columns_back(x):
    order = x.argsort(descending=True)
    out = torch.zeros(2, ROWS)
    out[:, order] = x[order].expand(2, ROWS)
    return out


def rounded_places(x):
    """Computed from the places of a sort: some are written twice."""
    out = torch.zeros(ROWS)
    out[x.sort().indices // 2] = x
    return out


def values_as_places(x):
    out = torch.zeros(ROWS)
    out[(x * 0).long().sort().values] = x
    return out


def part_of_the_places(x):
    out = torch.ones(ROWS)
    out[x.sort().indices[:4]] = x[:4]
    return out


def larger(x):
    """There are more positions than places."""
    out = torch.ones(ROWS + 3)
    out[x.sort().indices] = x
    return out


def added(x):
    return torch.ones(ROWS).index_put((x.sort().indices,), x, accumulate=True)


@pytest.mark.parametrize(
    "function, is_at_once",
    [
        *((function, True) for function in (inverse, sorted_back, columns_back)),
        *((function, False) for function in (rounded_places, values_as_places, part_of_the_places, larger, added)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_places(function, is_at_once):
    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    imported = import_model(Model(), (x,))
    names = {var.name_hint for var in imported.mod.get_global_vars()}
    assert ("scatter_permuted" in names) == is_at_once
    torch.testing.assert_close(compile_imported(imported)(x), function(x))
