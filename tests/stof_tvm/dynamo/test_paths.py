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
    for node in with_plain_paths(graph).graph.nodes:
        assert [entry[0] for entry in node.meta[STACK].values()] == ["", plain]
