"""Models as commands name them: what to compile, with which mask, for which target."""

import importlib
import inspect
import os
import sys
from pathlib import Path

from stof_tvm.cli.command import UsageError, usage
from tir_kernels.errors import InputError

NAMED = (
    "module:function or file.py:function that returns (model, example_inputs) or (model, example_inputs, mask); "
    "or 'demo'"
)


def add_model_arguments(command, name: str = "model", help: str = NAMED) -> None:
    """Add the arguments for the model, --target and --mask."""
    command.add_argument(name, help=help)
    command.add_argument("--target", help="compilation target; default: the GPU present, else LLVM")
    command.add_argument(
        "--mask", metavar="MASK", help="instead of the function's: as for 'stof mask', or a .json file of masks by path"
    )


def load_call(name: str, arguments) -> tuple:
    """(model, example inputs, mask or None): as `load_model` gives them, but with the mask of --mask if given."""
    from stof_tvm.cli.named.masks import masks_of

    # Before a model is loaded, which may take minutes:
    given = None if arguments.mask is None else masks_of(arguments.mask)
    if arguments.target is not None:
        check_target(arguments.target)
    model, inputs, mask = load_model(name, arguments.target)
    return model, inputs, mask if given is None else given


def check_target(text: str) -> None:
    """UsageError for what is no target."""
    from tir_kernels.target import parse_target

    with usage():
        parse_target(text)


def load_model(name: str, target=None) -> tuple:
    """(model, example inputs, mask or None) of "module:function", "path/file.py:function" or a built-in name.

    Raises InputError if the function is not there or returns something else, UsageError for what is no such name.
    """
    if name == "demo":
        from stof_tvm.demo import demo_call

        return demo_call(target)
    module, colon, function = name.partition(":")
    if not colon:
        raise UsageError(f"model {name!r} is neither 'demo' nor module:function nor path/file.py:function")
    path = Path(module)
    sys.path.insert(0, str(path.absolute().parent) if path.suffix == ".py" else os.getcwd())
    try:
        made = _function(name, _checked_stem(name, path) if path.suffix == ".py" else module, function)()
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InputError(f"{name} must return (model, example_inputs) or (model, example_inputs, mask)")
    return (*made, None)[:3]


def _checked_stem(name: str, path: Path) -> str:
    """The module name of a file; InputError where there is no such file, or another module has that name."""
    if not path.is_file():
        raise InputError(f"model {name!r} cannot be loaded: there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() != path.resolve():
        raise InputError(f"model {name!r} cannot be loaded: a module {path.stem!r} is loaded already; rename the file")
    return path.stem


def _function(name: str, module: str, function: str):
    """The function that a model's name stands for, callable without arguments."""
    try:
        made = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module may raise anything; the command shows its lines
        raise InputError(f"model {name!r} cannot be loaded: {error}") from error
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise InputError(f"model {name!r} must be a function that takes no arguments: {error}") from None
    return made
