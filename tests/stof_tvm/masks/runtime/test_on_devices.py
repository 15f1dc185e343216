"""Rules run where they were not written: exported, and on devices that the host doesn't wait for."""

import pytest
import torch

from stof_tvm import masks

runtime = masks.runtime
RULES = [
    runtime.top_blocks(2, block=(32, 64)),
    runtime.top_blocks(2, causal=True),
    runtime.top_blocks(2, pool="bounds"),
    runtime.vertical_slash(9, 12, last=16, sinks=2, window=4, block=32),
    runtime.xattention(8, 0.6, block=32),
    runtime.xattention(8, 0.6, causal=False),
    runtime.flex_prefill(0.6, 0.2, least=0, block=32),
    runtime.sparge(0.6, 0.035, block=32),
    runtime.sparge(0.6, 0.035, block=32, causal=True),
    runtime.flash_prefill(0.7, 1, 1, 1, block=32),
    runtime.low_rank(0.6, block=32),
    runtime.low_rank(k=2, block=32, causal=False),
    runtime.per_head(
        [runtime.xattention(8, 0.6), runtime.top_blocks(1), masks.a_shape(2, 9), runtime.xattention(8, 0.6)]
    ),
]


class Found(torch.nn.Module):
    """A rule's block map as a model."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, k):
        return self.rule.block_map(q, k)


def tensors(seed):
    torch.manual_seed(seed)
    return torch.randn(2, 4, 200, 16) * 4, torch.randn(2, 2, 200, 16)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_exported_rule_gives_the_same_map(rule):
    exported = torch.export.export(Found(rule), tensors(0), strict=False).module()
    maps = [rule.block_map(*tensors(seed)) for seed in (0, 1)]
    for seed, expected in enumerate(maps):
        assert torch.equal(exported(*tensors(seed)), expected)
    assert not torch.equal(*maps)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_is_read_on_the_host_nor_copied_from_it(rule):
    """A tensor of the meta device has no values to look at, and meets none of the CPU."""
    q, k = (x.to("meta") for x in tensors(0))
    found = rule.block_map(q, k)
    assert found.is_meta and found.shape == rule.block_map(*tensors(0)).shape


@pytest.mark.parametrize(
    "function, error",
    [
        (lambda q, k: q[:, :1, :1, :1] > q.sum().item(), "item"),
        (lambda q, k: (q[q > 0].sum() + q[:, :1, :4:1, :4]) > 0, "nonzero"),
        (lambda q, k: torch.ones(4, 1) * q[:, :1, :4, :4] > 0, "same device|cpu"),
    ],
)
def test_the_check_sees_what_waits_for_the_host(function, error):
    with pytest.raises((RuntimeError, NotImplementedError), match=error):
        runtime.rule(function).block_map(*(x.to("meta") for x in tensors(0)))
