"""What lists of programs by hand share: a program that is attention or is refused, and modules that hold them."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN

D = 8


@dataclass(frozen=True)
class Program:
    """A function of tensors; what is in the reason for which it is refused, None where it becomes attention."""

    function: object
    reason: str | None = None

    @property
    def name(self) -> str:
        return self.function.__name__


def program_list():
    """(a list of programs, a decorator that adds to it: @program becomes attention, @program("reason") is refused)."""
    programs = []

    def program(function_or_reason):
        if isinstance(function_or_reason, str):
            return lambda function: programs.append(Program(function, function_or_reason)) or function
        programs.append(Program(function_or_reason))
        return function_or_reason

    return programs, program


class One(nn.Module):
    """One program; a module of its own, so that its site has the program's name."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class All(nn.Module):
    """All of a list on the same inputs: one export and one compilation."""

    def __init__(self, programs):
        super().__init__()
        for each in programs:
            self.add_module(each.name, One(each.function))

    def forward(self, *args):
        return tuple(child(*args) for child in self.children())


def in_double(programs, args) -> list[torch.Tensor]:
    """What the programs compute in float64, in float32."""
    wide = [x.double() if x.is_floating_point() else x for x in args]
    with torch.no_grad():
        return [x.float() for x in All(programs)(*wide)]


def program_of(site) -> str:
    """The name of the program that a site is in: of several exponentials in one, the last is the softmax's."""
    return str(site).partition("#")[0]


def reasons(mod, program: Program) -> list[str]:
    """Why attention of a program was refused."""
    return [str(reason) for site, reason in mod.attrs[NOT_REWRITTEN] if program_of(site) == program.name]


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def attend(x, v):
    return torch.softmax(x, -1) @ v
