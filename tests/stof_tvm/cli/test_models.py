"""`stof tune`: models by name, and wrong usage."""

import subprocess
import sys

import pytest

from stof_tvm.errors import InputError
from stof_tvm.tune_cli import load_model


def give_two():
    return "model", ("inputs",)


def give_three():
    return "model", ("inputs",), "mask"


def give_one():
    return "model"


HERE = "tests.stof_tvm.test_tune_cli"


def test_a_function_gives_model_inputs_and_mask():
    assert load_model(f"{HERE}:give_two") == ("model", ("inputs",), None)
    assert load_model(f"{HERE}:give_three") == ("model", ("inputs",), "mask")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "module:function"),
        ("no_such_module:f", "no_such_module"),
        (f"{HERE}:no_such_function", "no_such_function"),
        (f"{HERE}:give_one", "must return"),
    ],
)
def test_what_is_no_model_is_an_error(name, why):
    with pytest.raises(InputError, match=why):
        load_model(name)


def test_help_shows_an_example():
    command = [sys.executable, "-m", "stof_tvm.cli", "tune", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "example: stof tune" in result.stdout and "--rpc-tracker" in result.stdout
