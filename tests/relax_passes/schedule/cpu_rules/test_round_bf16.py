"""What a model rounds to bfloat16 and widens again is rounded, in whatever a kernel fuses around it."""

import math

import torch
import torch.nn.functional as F

import stof_tvm


def rounded(x):
    return x.to(torch.bfloat16).float()


class Rounded(torch.nn.Module):
    def forward(self, x, y):
        return (
            rounded(x),
            rounded(x) * 3.0,
            rounded(x * y),
            torch.where(x > 0, x.bfloat16(), y.bfloat16()).float(),
            rounded(F.gelu(x)) - x,
            rounded(x.softmax(-1)) @ y.T,
            rounded(x) // 0.25,
            (x - rounded(x)).bfloat16(),
        )


def test_a_round_trip_rounds():
    x, y = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0], y[0, 1], y[1, 1] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38  # ties, and what rounds to infinity
    y[5, 0] = math.inf
    engine = stof_tvm.build(Rounded(), "llvm", (x, y), verify=False, tuning_logs=False)
    for got, expected in zip(engine(x, y), Rounded()(x, y), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    x[1, :3], y[2, 2] = math.nan, -math.nan
    got, expected = engine(x, y)[0], rounded(x)
    assert torch.equal(got.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


class Decided(torch.nn.Module):
    """What a rounding of computed numbers decides."""

    def forward(self, x):
        large, three = x + 64, x * 3
        return (
            (large == large.amax(-1, keepdim=True)).sum(-1),
            large.argmax(-1),
            large.float() - 64,
            F.layer_norm(large, (32,)),
            large.softmax(-1),
            three.long(),
            three.floor(),
            three.round(),
            three % 1,
            three > 5,
            three.sort(stable=True)[1],
        )


def test_what_a_rounding_decides_sees_rounded_numbers():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    engine = stof_tvm.build(Decided(), "llvm", (x,), verify=False, tuning_logs=False)
    for got, expected in zip(engine(x), Decided()(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-3)
        assert expected.is_floating_point() or torch.equal(got, expected)
