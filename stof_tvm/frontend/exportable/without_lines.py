"""Exports that do not note the line of the model that each operator comes from: finding it takes long."""

import contextlib

from torch.fx import config


@contextlib.contextmanager
def without_lines(wanted: bool = True):
    """A context in which torch.export leaves out `stack_trace`; nothing changes where that is not `wanted`.

    The setting belongs to the whole process (one_at_a_time.py); a PyTorch that does not know it notes the lines.
    """
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = before or wanted
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
