"""What torch.export demands of sizes, as expressions."""

from dataclasses import replace

import pytest
import torch
from torch.export import Dim

from stof_tvm.buckets.guards import guard_expressions
from stof_tvm.errors import ArtifactError
from stof_tvm.frontend.shape_range import range_of_program


class Model(torch.nn.Module):
    def forward(self, x, more):
        return x + more["y"][0].sum() + more["scale"]


@pytest.fixture(scope="module")
def shapes():
    inputs = torch.ones(2, 8), {"y": [torch.ones(6)], "scale": 2}
    dims = {"x": {0: Dim.AUTO, 1: Dim("n", min=2, max=64)}, "more": {"y": [{0: Dim("m", min=3, max=9)}], "scale": None}}
    return range_of_program(torch.export.export(Model(), inputs, dynamic_shapes=dims))


def holds(shapes, text: str, batch: int, n: int, m: int) -> bool:
    found = guard_expressions(replace(shapes, guard_texts=(text,)))
    assert all(told == text for _, told in found)
    numbers = dict(zip((shapes.shapes[0][0], shapes.shapes[0][1], shapes.shapes[1][0]), (batch, n, m)))
    return all(bool(expression.subs(numbers)) for expression, _ in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(L['x'].size()[1] % 2) == 0", True),
        ("L['x'].size()[1] != L['more']['y'][0].size()[0]", True),
        ("L['x'].size()[1] == L['more']['y'][0].size()[0]", False),
        ("3 <= L['x'].size()[1] and L['x'].size()[1] <= 9", True),
        ("3 <= L['x'].size()[1] < 8", False),
        ("L['x'].size()[0]*L['x'].size()[1] > 15 or L['x'].size()[0] == 1", True),
        ("not (L['x'].size()[1] // 3 == 2)", False),
        ("max(3, L['x'].size()[1]) == 8 and min(L['x'].size()[1], 3) == 3", True),
        ("Max(3, -L['x'].size()[1]) == 3", True),
        ("L['x'].size()[1] ** 2 - 1 == 63", True),
        ("L['more']['scale'] == 2", True),
        ("'a' != 'b'", True),
    ],
)
def test_texts_are_read(shapes, text, expected):
    assert holds(shapes, text, 2, 8, 6) == expected


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].stride()[0] == 1",
        "L['x'].size(0) == 2",
        "L['z'].size()[0] == 2",
        "math.floor(L['x'].size()[0]) == 2",
        "__import__('os').getpid() == 0",
        "L['x'].dtype == 'float32'",
        "'a' < 'b'",
        "[1 for _ in L]",
        "L['x'].size()[9] == 1",
    ],
)
def test_what_is_more_is_refused(shapes, text):
    with pytest.raises(ArtifactError, match="cannot be stored"):
        guard_expressions(replace(shapes, guard_texts=(text,)))


def test_no_text_and_what_always_holds(shapes):
    assert guard_expressions(replace(shapes, guard_texts=())) == ()
    assert guard_expressions(replace(shapes, guard_texts=("2 == 2",))) == ()
    with pytest.raises(ArtifactError, match="does not tell"):
        guard_expressions(replace(shapes, guard_texts=None))
    assert guard_expressions(replace(shapes, guard_texts=None, guards=None)) == ()


@pytest.mark.parametrize("text", ["1 == 2", "'a' == 'b'", "'a' != 'a'"])
def test_what_never_holds(shapes, text):
    with pytest.raises(ArtifactError, match="holds for none"):
        guard_expressions(replace(shapes, guard_texts=(text,)))
