"""Complex tensors inside a model: rotary embedding, parameters and buffers; inputs and outputs are refused."""

import pytest
import torch

from stof_tvm.frontend import import_model
from tests.models.running import error_against_torch
from tests.stof_tvm.frontend.batches import errors, message


def factors(length, width):
    inverse = 1.0 / 10000 ** (torch.arange(0, width, 2)[: width // 2].float() / width)
    return torch.polar(torch.ones(length, width // 2), torch.outer(torch.arange(length).float(), inverse))


def pairs(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def rotated(x):
    """As LLaMA's first release spells it."""
    return torch.view_as_real(pairs(x) * factors(6, 8)[None, :, None]).flatten(3).type_as(x)


def mixed(x):
    z = pairs(x) * factors(6, 8)[None, :, None].conj()
    a, b = torch.cat([z, -z], 1)[:, ::2].transpose(1, 2).chunk(2, -1)
    return torch.view_as_real(a + 2 * b - 1j * a).flatten(-2), z.real, z.imag, z.abs(), torch.exp(a).real, (z / 2).imag


FUNCTIONS = {
    "rotated": rotated,
    "half": lambda x: rotated(x.half()).float(),
    "double": lambda x: (torch.view_as_complex(x.double().reshape(2, 6, 3, 4, 2)) * factors(6, 8)[:, None]).real,
    "mixed": mixed,
    "sums": lambda x: torch.view_as_real(torch.complex(x, -x).sum(-1) + x[..., 0] + (1 + 2j)),
}


def test_numbers():
    torch.manual_seed(0)
    found = errors(FUNCTIONS, (torch.randn(2, 6, 3, 8),))
    assert {name: error for name, error in found.items() if error > (2e-3 if name == "half" else 1e-5)} == {}


class Factors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("saved", factors(6, 8))
        self.register_buffer("made", factors(6, 8), persistent=False)
        self.learned = torch.nn.Parameter(factors(6, 8), requires_grad=False)
        self.plain = factors(6, 8)

    def forward(self, x):
        return torch.view_as_real(pairs(x) * (self.saved * self.made + self.learned + self.plain)[:, None]).flatten(3)


def test_parameters_and_buffers_are_imported_and_left_as_they_were():
    torch.manual_seed(0)
    model, x = Factors(), torch.randn(2, 6, 3, 8)
    program = torch.export.export(model, (x,))
    for _ in range(2):
        assert error_against_torch(model, (x,)) < 1e-5
    for _ in range(2):
        assert error_against_torch(model, (x,), imported=import_model(program)) < 1e-5
    assert model.saved.is_complex() and program.state_dict["saved"].is_complex()


@pytest.mark.parametrize(
    ("function", "x", "why"),
    [
        (pairs, torch.randn(2, 8), "output 'view_as_complex' is complex"),
        (lambda z: z.abs(), torch.polar(torch.ones(4), torch.ones(4)), "input 'tensors_0' is complex"),
        (lambda x: pairs(x).sqrt().real, torch.randn(2, 8), "aten.sqrt.default on complex tensors has no converter"),
        (lambda x: (pairs(x) / pairs(x + 1)).real, torch.randn(2, 8), "a division by a complex tensor"),
    ],
)
def test_refused(function, x, why):
    assert why in message(function, x)
