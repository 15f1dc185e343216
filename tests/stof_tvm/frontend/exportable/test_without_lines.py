"""Lines of the model are noted only where messages have them, and the setting is restored."""

import torch
from torch.fx import config

from stof_tvm.frontend.export import export_model
from stof_tvm.frontend.exportable.without_lines import without_lines


def lines_of(program) -> list:
    return [node.meta["stack_trace"] for node in program.graph.nodes if "stack_trace" in node.meta]


def test_lines_are_noted_for_ranges_of_shapes_only():
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    assert not lines_of(export_model(model, (x,), {}))
    assert lines_of(export_model(model, (x,), {}, dynamic_shapes=({0: torch.export.Dim("rows", max=8)},)))
    assert lines_of(torch.export.export(model, (x,)))


def test_the_setting_is_restored():
    before = config.do_not_emit_stack_traces
    for wanted in (True, False):
        try:
            with without_lines(wanted):
                assert config.do_not_emit_stack_traces == (before or wanted)
                raise KeyError
        except KeyError:
            assert config.do_not_emit_stack_traces == before
