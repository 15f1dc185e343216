"""Operators that lose digits where they are spelled as in a textbook, beside PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from stof_tvm.errors import UnsupportedError
from stof_tvm.frontend import import_model
from tests.models.running import compile_imported

PROGRAMS = {
    "variance of large numbers": lambda x: (x * 1e-3 + 1000).var(-1),
    "norm of large numbers": lambda x: F.instance_norm(x * 0.01 + 100),
    "tail of erfc": lambda x: torch.erfc(x * 3),
    "erfc of the largest": lambda x: torch.erfc(x * 1e38),
}


class All(torch.nn.Module):
    def forward(self, x):
        return tuple(function(x) for function in PROGRAMS.values())


class Quotients(torch.nn.Module):
    def forward(self, x):
        return x // 0.7, torch.div(x, -0.3, rounding_mode="trunc"), torch.div(x, 0.1, rounding_mode="floor")


class Erfc(torch.nn.Module):
    def forward(self, x):
        return torch.erfc(x)


def test_no_less_exact_than_four_times_pytorch():
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    results = compile_imported(import_model(All(), (x,)))(x)
    for name, got, own, exact in zip(PROGRAMS, results, All()(x), All()(x.double()), strict=True):
        error, error_of_torch = (((y - exact).abs() / exact.abs().clamp(min=1e-37)).max() for y in (got, own))
        assert error <= 4 * error_of_torch + 4 * torch.finfo(torch.float32).eps, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_halves_are_not_rounded_where_pytorch_does_not(dtype):
    x = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    for got, want in zip(compile_imported(import_model(Quotients(), (x,)))(x), Quotients()(x), strict=True):
        assert torch.equal(got, want)


def test_writes_through_expand_are_refused():
    """They come as x + (new - x), which loses an infinite or a large x."""

    class Write(torch.nn.Module):
        def forward(self, x):
            y = x.clone()
            y.expand(1, *y.shape)[0].add_(1)
            return y

    class Read(torch.nn.Module):
        def forward(self, x):
            y = x.clone().add_(x.sum(0).expand(2, 3))
            y.scatter_(0, torch.zeros(1, dtype=torch.int64).expand(2, 3), x)
            return y.mul_(2)

    with pytest.raises(UnsupportedError, match=r"add_.Tensor writes into a tensor through expand\(\)"):
        import_model(Write(), (torch.ones(2, 3),))
    import_model(Read(), (torch.ones(2, 3),))


def test_float64_is_refused_where_there_are_only_the_digits_of_float32():
    with pytest.raises(UnsupportedError, match="digits of float32"):
        import_model(Erfc(), (torch.ones(3, dtype=torch.float64),))
