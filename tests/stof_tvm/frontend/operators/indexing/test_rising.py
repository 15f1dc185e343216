"""Which positions are known to rise from one that is given at run time, so that a state's rows are written at once."""

import pytest
import torch
from torch.export import export

import stof_tvm
from stof_tvm.frontend.operators.indexing.rising import is_rising

ROWS = 32
HEADS = torch.arange(2)[:, None]  # lifted to an input: its numbers are not looked at


class Index(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, at):
        return self.function(at)


@pytest.mark.parametrize(
    "index, expected",
    [
        (lambda at: at + torch.arange(4), True),
        (lambda at: torch.arange(4) + at[0], True),
        (lambda at: (torch.arange(2)[:, None] * 16 + torch.arange(16)).view(-1) + at[:1] * 3, True),
        (lambda at: ((torch.arange(2)[:, None] * 16 + torch.arange(4)) + at[:1]).flatten(), True),
        (lambda at: at[0] + torch.arange(ROWS + 1), False),  # the first and the last may be one, counted from the end
        (lambda at: (torch.arange(2)[:, None] * 16 + torch.arange(17)).view(-1) + at[:1], False),  # 16 twice
        (lambda at: at[0] - torch.arange(4), False),
        (lambda at: torch.add(torch.arange(4), at[0], alpha=-1), False),
        (lambda at: at + at, False),
        (lambda at: at[0] + torch.randint(9, (2,)), False),
        (lambda at: (HEADS * 16 + torch.arange(4)).view(-1) + at[:1], False),
        (lambda at: torch.arange(4), False),
    ],
)
def test_known_numbers_and_one_of_run_time(index, expected):
    program = export(Index(index), (torch.tensor([3]),)).run_decompositions()
    ((result,),) = program.graph.output_node().args
    assert is_rising(result, ROWS) == expected


class Rows(torch.nn.Module):
    """Writes rows from a position on, by `write`."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("rows", torch.zeros(ROWS, 8))

    def forward(self, at, x):
        self.write(self.rows, at + torch.arange(len(x)), x)
        return self.rows.sum(-1)


@torch.no_grad()
@pytest.mark.parametrize(
    "write", [lambda rows, at, x: rows.index_copy_(0, at, x), lambda rows, at, x: rows.__setitem__(at, x)]
)
def test_rows_from_a_position_on(write):
    """Also beyond the end, where the last row is poison."""
    model, x = Rows(write), torch.randn(5, 8)
    engine = stof_tvm.build(model, "llvm", (torch.tensor([2]), x))
    assert [state.result for state in engine.signature.states] == [None]
    for at in (4, ROWS - 5):
        torch.testing.assert_close(engine(torch.tensor([at]), x), model(torch.tensor([at]), x))
    engine.reset_state()
    assert engine(torch.tensor([ROWS - 3]), x).isnan().tolist() == [False] * (ROWS - 1) + [True]
