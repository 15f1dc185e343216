"""A process for one system on one case: it gets ready beside others, waits for its turn, and is measured alone."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import torch

CAUSE_LENGTH = 300
NOT_READY, NOT_MEASURED = "not ready in time", "not measured in time"

# Called in the process with the arguments given to the worker: fields of the row that are known when the system is
# ready, and a function that measures the rest of them.  Where a process measures several rows, that function gives
# an iterator of them.
GetReady = Callable[..., tuple[dict, Callable[[], dict | Iterable[dict]]]]


class Worker:
    """The process, seen from the one that plans.  A death of the process is a failed row."""

    def __init__(self, case, system: str, get_ready: GetReady, arguments: tuple, log: str):
        context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context
        self.case, self.system = case, system
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, get_ready, arguments, log), daemon=True)
        self.process.start()
        theirs.close()
        self.row, self.ready = None, False
        self.part: dict | None = None

    def is_ready(self, deadline: float) -> bool:
        """Whether the process waits for its turn, or has failed, before the deadline."""
        if not self.ready:
            self.ready = self._receive(deadline)
        return self.ready

    def measure(self, deadline: float, add_part: Callable[[dict], None] | None = None) -> dict:
        """Let the process measure when it is ready; its fields of the row.

        Where the process measures several rows, `add_part` takes the fields of each when it comes, and what is
        returned is not one of them: "failed" is in it if not all came.
        """
        if not self.is_ready(deadline):
            self.row = {"failed": NOT_READY}
        elif self.row is None:
            self.connection.send("go")
            while self._receive(deadline):
                if self.part is None:
                    break
                add_part(self.part)
            else:
                self.row = {"failed": NOT_MEASURED}
        self.close()
        return self.row

    def close(self) -> None:
        self.process.kill()
        self.process.join()

    def _receive(self, deadline: float) -> bool:
        """Take the process's next message, or note its death; False if neither came before the deadline."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            return False
        try:
            kind, fields = self.connection.recv()
        except EOFError:
            self.process.join()
            kind, fields = "row", {"failed": f"the process died with exit code {self.process.exitcode}"}
        self.part = fields if kind == "part" else None
        self.row = fields if kind == "row" else None
        return True


def serve(connection: Connection, get_ready: GetReady, arguments: tuple, log: str) -> None:
    """Send ("ready", None), wait for a word, send ("row", fields); "failed" is among the fields if something raised.

    Of several rows each is sent as ("part", fields), and the last message has only the fields that all share.
    """
    _print_to(log)
    torch.set_num_threads(1)
    row = {}
    try:
        with torch.no_grad():
            start = time.perf_counter()
            fields, measure = get_ready(*arguments)
            row |= {"prepare_s": round(time.perf_counter() - start, 1), **fields}
            connection.send(("ready", None))
            connection.recv()
            measured = measure()
            if isinstance(measured, dict):
                row |= measured
            else:
                for part in measured:
                    connection.send(("part", row | part))
    except Exception as error:
        traceback.print_exception(error)
        row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:CAUSE_LENGTH]
    connection.send(("row", row))


def _print_to(path: str) -> None:
    """Send what this process and its libraries print to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
