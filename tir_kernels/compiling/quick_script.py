"""TVMScript without its slow start: parsing a function asks Python for the source of every frame of the stack.

`@T.prim_func` calls `inspect.stack()`, which reads and searches the source file of each frame, although only the
nearest frames' lines are looked at (is the function defined in a class?).  Each expansion of a `T.inline` function
calls `inspect.getouterframes()` and looks at no line at all.  Below a deep stack that costs 0.15 s for each function:
half a minute for the 248 functions of `tvm.s_tir.tensor_intrin`, and more than half of the time that a kernel with
fifty inlined functions takes.

`inspect` belongs to the whole process, so only one thread at a time may patch it (compiling/one_at_a_time.py).
"""

import contextlib
import inspect
import sys

from tir_kernels.compiling.one_at_a_time import COMPILING

NEAR_FRAMES = 4  # the decorator's own and its callers', whose source the parser does read


@contextlib.contextmanager
def quick_script():
    """A context in which `inspect` reads fewer source lines: `stack()` those of near frames, `getouterframes()` none.

    Other threads wait to enter; the same thread may enter again.
    """
    with COMPILING:
        originals = inspect.stack, inspect.getouterframes
        inspect.stack, inspect.getouterframes = _stack, _outer_frames
        try:
            yield
        finally:
            inspect.stack, inspect.getouterframes = originals


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    return _outer_frames(sys._getframe(1), context, NEAR_FRAMES)


def _outer_frames(frame, context: int = 1, near: int = 0) -> list[inspect.FrameInfo]:
    frames = []
    while frame is not None:
        if len(frames) < near and not frame.f_code.co_filename.startswith("<"):
            frames.append(inspect.FrameInfo(frame, *inspect.getframeinfo(frame, context)))
        else:
            code = frame.f_code
            frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return frames
