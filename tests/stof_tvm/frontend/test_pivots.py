"""Names of sites count what may be attention, and nothing else."""

import pytest
import torch
from torch import nn

from stof_tvm.frontend import import_model


class Model(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x):
        x = self.before(x)
        return self.after(torch.softmax(x @ x.mT, -1) @ x)


def log_softmax_head(x):
    return x.log_softmax(-1)


def gaussian(x):
    return torch.exp(-(x - 1).pow(2)) + x


def gate(x):
    return x * x.softmax(-1)


def keep(x):
    return x


@pytest.mark.parametrize("before", [keep, gaussian, gate])
@pytest.mark.parametrize("after", [keep, log_softmax_head, gaussian])
def test_the_only_attention_has_its_modules_path(before, after):
    imported = import_model(Model(before, after), (torch.randn(2, 5, 4),))
    assert list(imported.site_nodes) == [""]
    assert imported.site_nodes[""].startswith("softmax")


def exp_and_sum(x):
    e = torch.exp(x @ x.mT)
    return (e @ x) / e.sum(-1, keepdim=True)


def by_einsum(x):
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", x, x).log_softmax(-1).exp(), x)


def by_sums(x):
    weights = (x[:, :, None] * x[:, None]).sum(-1).softmax(-1)
    return (weights[..., None] * x[:, None]).sum(-2)


@pytest.mark.parametrize(("other", "names"), [(exp_and_sum, 2), (by_einsum, 3), (by_sums, 2)])
def test_each_that_may_be_attention_is_counted(other, names):
    imported = import_model(Model(keep, other), (torch.randn(2, 5, 4),))
    assert len(imported.site_nodes) == names
