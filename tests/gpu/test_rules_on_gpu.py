"""Engines with rules on a GPU: what they find, and their results, beside `sparse_attention` with the same rules."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks, sparse_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
runtime = masks.runtime
RULES = {
    "top_blocks": runtime.top_blocks(3, block=64, causal=True),
    "vertical_slash": runtime.vertical_slash(20, 30, sinks=4, window=20, block=128),
    "xattention": runtime.xattention(stride=16, mass=0.7, block=64),
    "sparge": runtime.sparge(0.6, 0.035, block=64, causal=True),
    "own": runtime.rule(lambda q, k: q[:, :, ::64] @ k[:, :, ::64].repeat_interleave(4, 1).mT > 0) & masks.causal(),
}


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
def test_an_engine_finds_what_the_rule_finds(name):
    """Replays of a captured engine, with other inputs each."""
    rule = RULES[name]

    def inputs(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = ((1, 8, 700, 128), (1, 2, 700, 128), (1, 2, 700, 128))
        return tuple(torch.randn(*s, device="cuda", dtype=torch.float16, generator=generator) for s in shapes)

    engine = stof_tvm.build(Attend(), None, inputs(0), mask=rule)
    for seed in range(4):
        q, k, v = inputs(seed)
        out = engine(q, k, v)
        found = engine.found_blocks()[""].block_map
        assert (found != rule.block_map(q, k)).float().mean() < 0.01  # near ties in another order of summation
        same = runtime.rule(lambda q, k: found.cuda(), block=rule.block) & masks.causal()
        expected = sparse_attention(q, k, v, same, enable_gqa=True)
        assert float((out - expected).abs().max()) < 5e-3
