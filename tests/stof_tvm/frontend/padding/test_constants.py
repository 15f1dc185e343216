"""What rules compute of a program's constants: on the CPU, whatever device the program names."""

import torch

from stof_tvm.frontend.padding.rewriter import Rewriter


class Causal(torch.nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1).to(torch.float32).bool(), 0.0)


def test_constants_are_computed_without_the_programs_device():
    """Sizes of a range are built in forks, which cannot use a GPU that the process has used."""
    graph = torch.export.export(Causal(), (torch.randn(4, 4),)).graph
    for node in graph.nodes:  # as a program of a model on a GPU is
        node.args = tuple(torch.device("cuda") if isinstance(x, torch.device) else x for x in node.args)
        node.kwargs = {name: torch.device("cuda") if name == "device" else x for name, x in node.kwargs.items()}
    (masked,) = (node for node in graph.nodes if "masked_fill" in str(node.target))
    found = Rewriter(graph, {}, {}, {}, {}, False).constant(masked.args[1], 100)
    assert found.device.type == "cpu" and torch.equal(found, torch.ones(4, 4, dtype=torch.bool).triu(1))
