"""Results that are numbers, such as the length of a cache after a call: computed in Python, not by an engine.

A number that no tensor depends on may change from call to call without another engine.
"""

import torch


def take_numbers_out(graph: torch.fx.GraphModule) -> list[torch.fx.Node | None]:
    """Leave only tensors among a graph's results, in place; returns for each result its number's node, or None.

    A number stays in the graph where it depends on tensors that the graph computes.
    """
    output = graph.graph.output_node()
    results = output.args[0]
    if not isinstance(results, tuple | list):
        return [None]
    places = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    numbers = [x if isinstance(x, torch.fx.Node) and _is_known(x, places) else None for x in results]
    if all(x is None for x in numbers) or all(x is not None for x in numbers):
        return [None] * len(results)
    output.args = (tuple(x for x, number in zip(results, numbers) if number is None),)
    for node in reversed(list(graph.graph.nodes)):
        if _is_number(node) and node.op == "call_function" and not node.users:
            node.meta["stof.arguments"] = node.args, node.kwargs  # `number_of` reads them
            graph.graph.erase_node(node)
    graph.recompile()
    return numbers


def number_of(node: torch.fx.Node, values: dict[torch.fx.Node, object]):
    """A number that was taken out of a graph; `values` has those of the graph's inputs."""
    if node in values:
        return values[node]
    args, kwargs = node.meta.get("stof.arguments", (node.args, node.kwargs))
    args, kwargs = torch.fx.map_arg((args, kwargs), lambda x: number_of(x, values))
    assert callable(node.target)  # as of every function that is called
    return node.target(*args, **kwargs)


def _is_number(node: torch.fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def _is_known(node: torch.fx.Node, places: dict) -> bool:
    """Whether a node is a number that is computed from inputs of the graph that are numbers."""
    if not _is_number(node) or node in places:
        return _is_number(node)
    return node.op == "call_function" and all(_is_known(x, places) for x in node.all_input_nodes)
