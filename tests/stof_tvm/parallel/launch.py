"""Runs a module of checks as processes on the CPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.rare_collections import rare_collections

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, folder: Path, count: int = 2) -> list[dict]:
    """What each rank of `python -m MODULE RANK PORT FOLDER` wrote to FOLDER/RANK.json; ranks but 0 may be killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    with (folder / "log").open("w") as log:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), port, str(folder)], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
            for rank in range(count)
        ]
        try:
            assert ranks[0].wait(timeout=300) == 0, (folder / "log").read_text()[-4000:]
            for rank in ranks[1:]:
                rank.wait(timeout=60)
        finally:
            for process in ranks:
                process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def run_checks(checks, mesh, rank: int, folder: str) -> None:
    """Write what each check finds, by its name, and end this process."""
    rare_collections()
    found = {}
    for check in checks:
        found[check.__name__] = check(rank, mesh)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the group cannot be destroyed with a rank that is gone
