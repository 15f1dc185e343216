"""The kernels of vertical and slash positions for tensors of the CPU, which stand for a GPU's."""

import functools
from importlib import import_module

import torch

from stof_tvm.masks.runtime import last_queries, on_gpu
from tests.tir_kernels.attention.block_maps.emulated import emulated
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.selection.last_weights import KEYS, THREADS, normalizers, sums
from tir_kernels.selection.vertical_slash_map import tile_of, vertical_slash_map

RULE = import_module("stof_tvm.masks.runtime.vertical_slash")  # by its name in the package the rule is found


def tiles_across(numbers: dict, block: tuple[int, int]) -> int:
    width = numbers["map_columns"]
    return -(-(width + (3 if width % 4 else 0)) // tile_of(block)[1])


CTAS = {
    normalizers: lambda numbers: numbers["lines"],
    sums: lambda numbers: numbers["heads"] * -(-numbers["n"] // (KEYS * THREADS)),
    vertical_slash_map: lambda numbers, block: (
        numbers["heads"] * tiles_across(numbers, block) * -(-numbers["map_rows"] // tile_of(block)[0])
    ),
}


def use_emulated_gpu(monkeypatch, folder) -> list:
    """From now on rules take the way of a GPU, and kernels are emulated; returns the kernels that are called."""
    called = []

    @functools.cache
    def kernel(device, make, *args):
        with quick_script():
            function = make(*args)
        run, ctas = emulated(function, folder, f"{make.__name__}{args}"), CTAS[make]

        def call(*operands):
            called.append(make)
            arrays, numbers = {}, {}
            for parameter, operand in zip(function.params, operands, strict=True):
                if not isinstance(operand, torch.Tensor):
                    numbers[parameter.name] = operand
                    continue
                assert operand.is_contiguous() and operand.numel()
                arrays[parameter.name] = operand.numpy()
                for extent, size in zip(parameter.ty.shape, operand.shape, strict=True):
                    symbol = getattr(extent, "name", None)
                    assert (numbers.setdefault(symbol, size) if symbol else int(extent)) == size
            if make is vertical_slash_map:
                arrays |= dict.fromkeys(("kept_bytes", "kept_words"), arrays["kept"])
            # What the host computes for all CTAs of a map: how many tiles lie side by side.
            hoisted = {name.removesuffix("_ptr") for name in run.parameters} - {*numbers, *arrays}
            numbers |= {name: tiles_across(numbers, *args) for name in hoisted}
            run(arrays, numbers, range(ctas(numbers, *args)), THREADS, 0)

        return call

    for module in (last_queries, RULE):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(on_gpu, "_kernel", kernel)
    return called
