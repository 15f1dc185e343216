"""TVMScript without its slow start: parsing a function asks Python for the source of every frame of the stack.

`@T.prim_func` calls `inspect.stack()`, which reads and searches the source file of each frame, although only the
nearest frames' lines are looked at (is the function defined in a class?).  Below a deep stack that costs 0.15 s a
function, and half a minute for the 248 functions of `tvm.s_tir.tensor_intrin`.
"""

import contextlib
import inspect
import sys

NEAR_FRAMES = 4  # the decorator's own and its callers', whose source the parser does read


@contextlib.contextmanager
def quick_script():
    """Within, `inspect.stack()` reads source lines for the nearest frames only."""
    original = inspect.stack
    inspect.stack = _stack
    try:
        yield
    finally:
        inspect.stack = original


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if len(frames) < NEAR_FRAMES and not frame.f_code.co_filename.startswith("<"):
            details = inspect.getframeinfo(frame, context)
        else:
            details = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None
        frames.append(inspect.FrameInfo(frame, *details))
        frame = frame.f_back
    return frames
