"""Calls by position and keyword, nested inputs and outputs, constants, wrong arguments, storage as JSON."""

import collections
import json

import pytest
import torch
from torch import nn

from stof_tvm.frontend import import_model
from stof_tvm.signature import Signature
from tests.models.running import compile_imported, largest_error
from tests.models.transformers_models import transformers_inputs, transformers_model
from tir_kernels.errors import ArtifactError, InputError, UnsupportedError


class Mixed(nn.Module):
    """Positional, optional, nested and constant arguments; a nested result with None, a number and one tensor twice."""

    def forward(self, x, y=None, *, scale=2.0, flag=True, parts=None):
        z = x * scale if flag else x
        if y is not None:
            z = z + y
        if parts is not None:
            z = z + parts["left"] - parts["rest"][0] * parts["rest"][1]
        return {"z": z, "pair": (z, None), "x": x, "list": [x.sum(), 3]}


X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
PARTS = {"left": torch.full((2, 3), 5.0), "rest": [torch.full((3,), 0.5), 4]}


@pytest.fixture(scope="module")
def mixed():
    imported = import_model(Mixed(), (X, Y), {"scale": 3.0, "parts": PARTS})
    return imported.signature, compile_imported(imported)


def test_flat_inputs_and_outputs(mixed):
    signature, _ = mixed
    assert [(s.name, s.shape, s.dtype) for s in signature.inputs] == [
        ("x", (2, 3), "float32"),
        ("y", (2, 3), "float32"),
        ("parts_left", (2, 3), "float32"),
        ("parts_rest_0", (3,), "float32"),
    ]
    assert [s.shape for s in signature.outputs] == [(2, 3), (2, 3), ()]  # z once, x, the sum
    assert {leaf.value for leaf in signature.in_leaves if leaf.tensor is None} == {3.0, 4}


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((X, Y), {"scale": 3.0, "parts": PARTS}),
        ((X,), {"y": Y, "parts": PARTS, "scale": 3.0}),
        ((), {"parts": dict(reversed(PARTS.items())), "scale": 3.0, "y": Y, "x": X}),
        ((X, Y), {"scale": 3.0, "parts": PARTS, "flag": True}),
    ],
    ids=["as exported", "by keyword", "any order", "default given"],
)
def test_a_call_gives_what_the_model_gives(mixed, args, kwargs):
    _, call = mixed
    expected = Mixed()(X, Y, scale=3.0, parts=PARTS)
    got = call(*args, **kwargs)
    assert largest_error(got, expected) < 1e-6
    assert got["pair"][1] is None and got["list"][1] == 3


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((X,), {"scale": 3.0, "parts": PARTS}, "y must be a float32 tensor of shape \\(2, 3\\), got None"),
        ((X, Y), {"parts": PARTS}, "scale is 2.0; the model was exported with 3.0"),
        ((X, Y), {"scale": 3, "parts": PARTS}, "scale is 3; the model was exported with 3.0"),
        ((X, Y), {"scale": 3.0, "parts": PARTS, "flag": False}, "'flag' was not part of the export"),
        ((X, Y), {"scale": 3.0, "parts": PARTS, "nonsense": 1}, "'nonsense' was not part of the export"),
        ((X, Y, Y), {"scale": 3.0, "parts": PARTS}, "3 positional arguments"),
        ((X, Y), {"x": X, "scale": 3.0, "parts": PARTS}, "'x' is given by position and by keyword"),
        ((X, Y), {"scale": 3.0, "parts": {"left": Y}}, "not nested as in the export"),
        ((X, Y.double()), {"scale": 3.0, "parts": PARTS}, "y must be a float32 tensor .* got a float64 tensor"),
        ((X[:1], Y), {"scale": 3.0, "parts": PARTS}, "x must be .*\\(2, 3\\), got .* of shape \\(1, 3\\)"),
        ((X, 1.0), {"scale": 3.0, "parts": PARTS}, "y must be a float32 tensor .* got 1.0"),
    ],
)
def test_a_wrong_call_is_named(mixed, args, kwargs, message):
    with pytest.raises(InputError, match=message):
        mixed[0].flatten(args, kwargs)


def test_a_missing_argument_is_named():
    signature = import_model(nn.Linear(3, 3), (X,)).signature
    with pytest.raises(InputError, match="'input' is missing"):
        signature.flatten((), {})


def test_inputs_are_made_contiguous_and_free_of_gradients(mixed):
    x = X.mT.contiguous().mT.requires_grad_()
    tensors = mixed[0].flatten((x, Y), {"scale": 3.0, "parts": PARTS})
    assert tensors[0].is_contiguous() and not tensors[0].requires_grad and torch.equal(tensors[0], X)


class Variadic(nn.Module):
    def forward(self, *tensors, **named):
        return sum(tensors) + named["last"]


def test_one_example_tensor_for_two_arguments_stays_two_inputs():
    """torch.export wires both places to the last of them."""
    imported = import_model(Mixed(), (X, X), {"scale": 1.0})
    assert largest_error(compile_imported(imported)(X, Y, scale=1.0)["z"], X + Y) == 0


def test_variadic_arguments():
    imported = import_model(Variadic(), (X, Y), {"last": Y})
    assert largest_error(compile_imported(imported)(X, Y, last=Y), X + 2 * Y) == 0
    with pytest.raises(InputError, match="3 positional"):
        imported.signature.flatten((X, Y, X), {"last": X})


Point = collections.namedtuple("Point", ["first", "second"])


class Outputs(nn.Module):
    """An input returned as it is, a constant tensor, an unused input, a named tuple."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x, unused):
        return Point(x, (self.table, x + 1))


def test_outputs_that_are_inputs_or_buffers():
    imported = import_model(Outputs(), (X, Y))
    assert [s.name for s in imported.signature.inputs] == ["x", "unused"]
    got = compile_imported(imported)(X, Y)
    assert isinstance(got, Point) and torch.equal(got.second[0], torch.arange(3.0))
    assert largest_error(got, Outputs()(X, Y)) == 0


def test_exported_program_is_called_by_its_own_names():
    program = torch.export.export(Mixed(), (X, Y), {"scale": 3.0})
    before = str(program)
    signature = import_model(program).signature
    assert str(program) == before
    assert [t.tolist() for t in signature.flatten((X, Y), {"scale": 3.0})] == [X.tolist(), Y.tolist()]
    assert [t.tolist() for t in signature.flatten((X,), {"scale": 3.0, "y": Y})] == [X.tolist(), Y.tolist()]
    with pytest.raises(InputError, match="'scale' is missing"):
        signature.flatten((X, Y), {})


def test_a_model_without_tensor_output_is_refused():
    class Nothing(nn.Module):
        def forward(self, x):
            return None, 3

    with pytest.raises(UnsupportedError, match="returns no tensor"):
        import_model(Nothing(), (X,))


# -- JSON -----------------------------------------------------------------------------------------------------------


def test_json_round_trip(mixed):
    signature, _ = mixed
    assert Signature.from_json(signature.to_json()) == signature


def test_json_keeps_transformers_output_objects():
    model, inputs = transformers_model("bert", "sdpa"), transformers_inputs("bert", padded=True)
    signature = Signature.from_json(import_model(model, (), inputs).signature.to_json())
    expected = model(**inputs)
    result = signature.unflatten([expected.last_hidden_state, expected.pooler_output])
    assert type(result) is type(expected) and torch.equal(result.pooler_output, expected.pooler_output)
    assert len(signature.flatten((), {**inputs, "token_type_ids": None})) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("inputs"),
        lambda d: d["in_leaves"][0].pop("name"),
        lambda d: d["inputs"][0].update(dtype="float"),  # torch.float is another name of torch.float32
    ],
)
def test_damaged_json_is_an_artifact_error(mixed, damage):
    data = json.loads(mixed[0].to_json())
    damage(data)
    with pytest.raises(ArtifactError, match="malformed"):
        Signature.from_json(json.dumps(data))
    with pytest.raises(ArtifactError, match="malformed"):
        Signature.from_json("{")


def test_json_with_an_unknown_output_type_is_an_artifact_error(mixed):
    text = mixed[0].to_json()
    unknown = text.replace("builtins.dict", "somewhere.Dict")
    assert unknown != text
    with pytest.raises(ArtifactError, match="somewhere.Dict"):
        Signature.from_json(unknown)
    absent = text.replace("builtins.dict", "transformers.nowhere.Output")
    with pytest.raises(ArtifactError, match="transformers.nowhere"):
        Signature.from_json(absent)


class Cached(nn.Module):
    def forward(self, ids, past=None, keep=None):
        return ids + keep


def test_a_positional_argument_that_was_left_out_of_the_example():
    """It stands where the caller thinks another one does."""
    signature = import_model(Cached(), (), {"ids": X, "keep": Y}).signature
    assert len(signature.flatten((X, None, Y), {})) == 2
    with pytest.raises(InputError, match="positional argument 2 is 'past', which the .* did not have: .* ids, keep"):
        signature.flatten((X, Y), {})
