"""Cleaning up after an exception in a function that is being built."""

import contextlib
from collections.abc import Iterator

from tvm import relax
from tvm.error import InternalError


@contextlib.contextmanager
def closing_blocks(builder: relax.BlockBuilder) -> Iterator[None]:
    """A context in which an exception leaves no block of the builder open.

    TVM warns on stderr if a builder is destroyed with an open block.  Neither `builder.function` nor a mutator closes
    its blocks on the way out.
    """
    try:
        yield
    except BaseException:
        close_blocks(builder)
        raise


def close_blocks(builder: relax.BlockBuilder) -> None:
    """End every block that is open; what they hold is dropped."""
    with contextlib.suppress(InternalError):  # no block is being built
        while True:
            builder._end_block()
