"""Models as commands name them: what to compile, with which mask, for which target."""

import importlib
import os
import sys

from tir_kernels.errors import InputError

NAMED = "module:function that returns (model, example_inputs) or (model, example_inputs, mask); or 'demo'"


def add_model_arguments(command, name: str = "model", help: str = NAMED) -> None:
    """The model, --target and --mask."""
    command.add_argument(name, help=help)
    command.add_argument("--target", help="compilation target; default: the GPU present, else LLVM")
    command.add_argument("--mask", metavar="MASK", help="instead of the function's; as for 'stof mask'")


def load_call(name: str, arguments) -> tuple:
    """(model, example inputs, mask or None): those of a model's name, and the mask of --mask where it is given."""
    model, inputs, mask = load_model(name, arguments.target)
    if arguments.mask is not None:
        from stof_tvm.masks.text import parse_mask

        mask = parse_mask(arguments.mask)
    return model, inputs, mask


def load_model(name: str, target=None) -> tuple:
    """(model, example inputs, mask or None) of "module:function" or a built-in name.

    Raises InputError for what is not there or returns something else.
    """
    if name == "demo":
        from stof_tvm.demo import demo_call

        return demo_call(target)
    module, colon, function = name.partition(":")
    if not colon:
        raise InputError(f"model {name!r} is neither 'demo' nor module:function")
    sys.path.insert(0, os.getcwd())
    try:
        made = _function(name, module, function)()
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InputError(f"{name} must return (model, example_inputs) or (model, example_inputs, mask)")
    return (*made, None)[:3]


def _function(name: str, module: str, function: str):
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"model {name!r} cannot be loaded: {error}") from None
