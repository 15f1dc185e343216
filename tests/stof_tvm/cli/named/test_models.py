"""Models by name, and what is none."""

import re
import sys
from argparse import Namespace

import pytest

from stof_tvm import masks
from stof_tvm.cli.named.model_lines import model_lines
from stof_tvm.cli.named.models import load_call, load_model
from stof_tvm.errors import InputError


def give_two():
    return "model", ("inputs",)


def give_three():
    return "model", ("inputs",), "mask"


def give_one():
    return "model"


def give_none():
    return give_one.no_such_attribute


HERE = "tests.stof_tvm.cli.named.test_models"


def test_a_function_gives_model_inputs_and_mask():
    assert load_model(f"{HERE}:give_two") == ("model", ("inputs",), None)
    assert load_model(f"{HERE}:give_three") == ("model", ("inputs",), "mask")


def test_a_file_is_a_module_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text("def f():\n    return 'model', ('inputs',)\n")
    monkeypatch.chdir("/")
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    assert load_model(f"{tmp_path}/models_of_mine.py:f") == ("model", ("inputs",), None)
    monkeypatch.chdir(tmp_path)
    assert load_model("models_of_mine.py:f") == ("model", ("inputs",), None)
    (tmp_path / "json.py").write_text("def f(): pass")
    with pytest.raises(InputError, match="'json' is loaded already; rename"):
        load_model("json.py:f")
    with pytest.raises(InputError, match="no file missing.py"):
        load_model("missing.py:f")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "module:function"),
        ("no_such_module:f", "no_such_module"),
        (":f", "cannot be loaded"),
        (f"{HERE}:no_such_function", "no_such_function"),
        (f"{HERE}:give_one", "must return"),
    ],
)
def test_what_is_no_model_is_an_error(name, why):
    with pytest.raises(InputError, match=why):
        load_model(name)


def test_a_mask_that_is_given_replaces_the_functions():
    arguments = Namespace(target=None, mask=None)
    assert load_call(f"{HERE}:give_three", arguments)[2] == "mask"
    arguments.mask = "sliding_window(3)"
    assert load_call(f"{HERE}:give_three", arguments) == ("model", ("inputs",), masks.sliding_window(3))


def test_what_a_function_raises_is_its_own():
    with pytest.raises(AttributeError, match="no_such_attribute"):
        load_model(f"{HERE}:give_none")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def made(a):\n    return a\n", "takes no arguments: missing a required argument: 'a'"),
        ("def made(:\n", "cannot be loaded: invalid syntax"),
        ("import torch\n\nx = torch.nnn.Linear(3, 3)\n", "cannot be loaded: module 'torch' has no attribute 'nnn'"),
        ("x = int(None)\n", "cannot be loaded: int"),
    ],
)
def test_what_a_users_file_gets_wrong_is_an_error(text, why, tmp_path):
    file = tmp_path / f"{tmp_path.name}.py"  # a name of its own: what was imported once is not read again
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(why)):
        load_model(f"{file}:made")


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_syntax_error_shows_its_line(is_imported, tmp_path):
    """In the file itself, or in a module that it imports: the interpreter has no frame there."""
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text("import torch\n\ndef made(:\n    pass\n")
    named = file
    if is_imported:
        named = tmp_path / f"imports_{tmp_path.name}.py"
        named.write_text(f"import {file.stem}\n")
    with pytest.raises(InputError) as raised:
        load_model(f"{named}:made")
    lines = model_lines(raised.value.__cause__)
    assert f'File "{file}", line 3' in lines and "def made(:" in lines
    assert "site-packages" not in lines and "stof_tvm/cli" not in lines
