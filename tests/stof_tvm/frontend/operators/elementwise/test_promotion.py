"""Elementwise operators in PyTorch's computation dtype: what is cast, what stays as it was, what is refused."""

import pytest
import torch

from stof_tvm.errors import UnsupportedError
from stof_tvm.frontend import import_model
from tests.models.running import compile_imported, operator_names

inf, nan = float("inf"), float("nan")
# i int64, s int8, u uint8, b bool, x float32, h float16, z int64 without dimensions; (4,) but z
PROGRAMS = {
    "integer times a fraction": lambda t: t["i"] * 0.7,
    "integer plus True": lambda t: t["i"] + True,
    "integer below a fraction": lambda t: t["i"] < 1.5,
    "integer equals a fraction": lambda t: t["i"] == 1.5,
    "integer divided by an integer": lambda t: t["i"] / t["s"],
    "byte over its range": lambda t: t["s"] * 100,
    "byte by a number without dimensions": lambda t: t["s"] * t["z"],
    "byte and float without dimensions": lambda t: t["s"] * t["x"][0],
    "unsigned and signed byte": lambda t: t["u"] - t["s"],
    "booleans plus": lambda t: t["b"] + ~t["b"],
    "booleans times": lambda t: t["b"] * t["b"],
    "boolean times a fraction": lambda t: t["b"] * 0.5,
    "booleans, the larger": lambda t: torch.maximum(t["b"], ~t["b"]),
    "integer exponential": lambda t: t["s"].exp(),
    "beyond 53 bits": lambda t: t["i"] + (2**53 + 1),
    "wraps around": lambda t: (t["i"] + 2**62) * 3,
    "half and float": lambda t: t["h"] * t["x"],
    "half and a float without dimensions": lambda t: t["h"] * t["x"][1],
    "half times more than half holds": lambda t: t["h"] * 1e-3 * 1e5 * 1e-7,
    "half power": lambda t: t["h"] ** 2,
    "floor of a negative quotient": lambda t: torch.div(t["i"], -2, rounding_mode="floor"),
    "remainder of a negative": lambda t: t["i"] % -3,
    "remainder by infinity": lambda t: t["x"] % inf,
    "two to integers": lambda t: 2 ** t["i"].abs(),
    "not equal to NaN": lambda t: t["x"].log() != t["x"].log(),
    "sum of bytes": lambda t: t["s"].sum(),
    "in place of halves": lambda t: t["h"].clone().addcmul_(t["x"], t["x"], value=0.5),
    "mean in another dtype": lambda t: t["i"].mean(dtype=torch.float32),
}
INPUTS = {
    "i": torch.tensor([-7, 1, 2, 5]),
    "s": torch.tensor([-100, 3, 2, 7], dtype=torch.int8),
    "u": torch.tensor([0, 3, 200, 255], dtype=torch.uint8),
    "b": torch.tensor([True, False, True, True]),
    "x": torch.tensor([-1.5, 2.5, 0.25, 3.0]),
    "h": torch.tensor([0.1, -2.0, 3.0, 60000.0], dtype=torch.float16),
    "z": torch.tensor(3),
}


class Programs(torch.nn.Module):
    def forward(self, t):
        return {name: program(t) for name, program in PROGRAMS.items()}


@pytest.fixture(scope="module")
def got():
    return compile_imported(import_model(Programs(), (INPUTS,)))(INPUTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_dtype_and_values_are_pytorch_s(got, name):
    torch.testing.assert_close(got[name], PROGRAMS[name](INPUTS), equal_nan=True)


class One(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, *args):
        return self.program(*args)


@pytest.mark.parametrize(
    "program, expected",
    [
        (lambda x: x * 0.1, ["multiply"]),  # a number that is merely rounded
        (lambda x: x * 1e-7, ["astype", "multiply", "astype"]),  # a number that half precision cannot hold
        (lambda x: x + x, ["add"]),
    ],
)
def test_half_precision_is_widened_only_for_numbers_that_do_not_fit(program, expected):
    assert operator_names(import_model(One(program), (torch.ones(4, dtype=torch.float16),)).mod) == expected


@pytest.mark.parametrize(
    "program, words",
    [
        (lambda b: b**True, "aten.pow.Tensor_Scalar.*power of booleans"),
        (lambda b: torch.lgamma(b.float()), "aten.lgamma.default"),
        (lambda b: b.long() ** b.long(), "integers to the power of a tensor"),
        (lambda b: b.long() // 0, "divided by a constant that is 0"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(program, words):
    with pytest.raises(UnsupportedError, match=words):
        import_model(One(program), (torch.tensor([True, False]),))


def test_an_operator_of_another_library_with_a_name_of_pytorch_s_is_refused():
    library = torch.library.Library("stof_others", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: x + 1, "CompositeExplicitAutograd")
    library.impl("relu", lambda x: torch.empty_like(x), "Meta")
    with pytest.raises(UnsupportedError, match="stof_others.relu"):
        import_model(One(torch.ops.stof_others.relu), (torch.ones(2),))
