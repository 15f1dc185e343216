"""Ctrl-C while TVM runs a Python pass: TVM passes an exception on by its type's name, and knows few types.

Other types become a RuntimeError, which callers take for a failure of TVM.  That must not happen to an interrupt, or to
an exit that a signal handler asks for.
"""

from tvm_ffi import register_error


class _Exit(SystemExit):
    """A SystemExit made again from its `str`, which is all that TVM keeps: a status, a message or "None"."""

    def __init__(self, text: str):
        code = int(text) if text.removeprefix("-").isdecimal() else text
        super().__init__(None if text == "None" else code)


def register_interrupts() -> None:
    """From now on a KeyboardInterrupt or SystemExit that passes through TVM comes out as one."""
    register_error("KeyboardInterrupt", KeyboardInterrupt)
    register_error("SystemExit", SystemExit)  # the name under which a SystemExit goes in
    register_error("SystemExit", _Exit)  # the type that comes out under this name
