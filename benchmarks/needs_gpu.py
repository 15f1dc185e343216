"""The error of scripts that measure on a GPU, where there is none."""

import argparse
import sys
from pathlib import Path

import torch

NEED_NONE = ("dry_run", "merge", "worker")


def need_gpu(options: argparse.Namespace) -> None:
    """End the script with status 2 unless there is a GPU, or it is asked for something that needs none."""
    asked = [getattr(options, name, None) for name in NEED_NONE]
    if torch.cuda.is_available() or any(value is not None and value is not False for value in asked):
        return
    dry = ": --dry-run goes through every case on the CPU" if hasattr(options, "dry_run") else ""
    print(f"{Path(sys.argv[0]).name}: there is no CUDA GPU here{dry}", file=sys.stderr)
    raise SystemExit(2)
