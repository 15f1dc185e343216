"""Module paths of TorchDynamo's graphs, as torch.export writes them."""

import pytest
import torch

from stof_tvm.dynamo.paths import STACK, with_plain_paths


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("L['self']", ""),
        ("L['self'].encoder.layer[0].attention", "encoder.layer.0.attention"),
        ("L['self'].layers.0.norm@1", "layers.0.norm@1"),
        ("L['self'].blocks['first']", "blocks.first"),
        ("L['self']._modules['blocks']._modules['0'].self", "blocks.0.self"),
        ("L['fn'].layers[11]", "layers.11"),
        ("L['fnord'].layers[11]", "fnord.layers.11"),
        ("L['model'].layers[1]", "model.layers.1"),
        ("G['selfish'].layers[1]", "selfish.layers.1"),
    ],
)
def test_a_path_is_plain_and_below_the_model(path, plain):
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    for node in graph.graph.nodes:
        node.meta[STACK] = {"140003": (path, torch.nn.ReLU)}
        node.meta["stack_trace"] = '  File "model.py", line 3, in call\n    return self.relu(x)\n'
    for node in with_plain_paths(graph).graph.nodes:
        assert [entry[0] for entry in node.meta[STACK].values()] == ["", plain]


class Attend(torch.nn.Module):
    def forward(this, x):  # noqa: N805  what a model calls itself
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Attend() for _ in range(2))

    def forward(this, x):  # noqa: N805
        return this.blocks[1](this.blocks[0](x))


class Broken(Blocks):
    def forward(s, x):  # noqa: N805
        x = s.blocks[0](x)
        torch._dynamo.graph_break()
        return s.blocks[1](x)


def call(model, x):
    return model(x)


def call_blocks(model, x):
    return model.blocks[1](model.blocks[0](x))


def call_two(first, second, x):
    return second.blocks[1](first.blocks[0](x))


@pytest.mark.parametrize(
    "function, models, within",
    [
        (Blocks(), 0, ["", ""]),
        (Blocks().forward, 0, ["", ""]),
        (Broken(), 0, ["", ""]),
        (call, 1, ["model.", "model."]),
        (call_blocks, 1, ["model.", "model."]),
        (call_two, 2, ["first.", "second."]),
    ],
    ids=["a model", "its forward", "with a break", "a function", "a function of blocks", "a function of two models"],
)
def test_a_model_may_call_itself_by_any_name(function, models, within):
    """Paths are those that torch.export has for the model, whatever `forward` calls its first parameter."""
    found = []

    def backend(graph, _example):
        for node in with_plain_paths(graph).graph.nodes:
            if "scaled_dot_product" in str(node.target):
                found.append([*node.meta[STACK].values()][-1][0])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*(Blocks() for _ in range(models)), torch.randn(1, 2, 8, 16))
    assert found == [f"{name}blocks.{number}" for number, name in enumerate(within)]
