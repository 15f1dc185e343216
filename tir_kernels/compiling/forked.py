"""Run work in a fork of the process, because it may end the process: LLVM exits if it cannot write an object file.

A process that uses a GPU is not forked, because CUDA does not support that.  A full disk does end such a process.
"""

import ctypes
import os
import sys
from collections.abc import Callable


def in_a_copy(work: Callable[[], None]) -> list[bytes]:
    """Run `work`, which only writes files, in a fork of this process; returns the lines that it wrote to stderr.

    Raises RuntimeError with these lines if `work` raised or ended the process.  If the process uses a GPU, `work` runs
    in the process itself.
    """
    if _uses_gpu():
        work()
        return []
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as said:
            lines = said.readlines()
    finally:
        _, status = os.waitpid(child, 0)
    if status:
        text = b"".join(lines).decode(errors="replace").strip()
        raise RuntimeError(text or f"a process ended with status {os.waitstatus_to_exitcode(status)}")
    return lines


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _work_and_exit(work: Callable[[], None], writer: int) -> None:
    os.dup2(writer, 2)
    status = 1
    end_at_once()
    try:
        work()
        status = 0
    except Exception as error:
        os.write(writer, str(error).encode(errors="replace"))
    finally:
        os._exit(status)


def end_at_once() -> None:
    """Let exit() end this process, a fork, at once.

    LLVM ends a process by exit(), which first destroys what is the thread's own, such as TVM's pool of threads, and
    then calls handlers.  Both wait for threads that a fork does not have, for ever.  What was registered last comes
    first; a thread's destructors are not told the status, so there it is 1.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    if hasattr(libc, "__cxa_thread_atexit_impl"):
        end = ctypes.cast(libc._exit, ctypes.c_void_p)
        libc.__cxa_thread_atexit_impl(end, ctypes.c_void_p(1), end)  # the last: an address in the library that it is of
