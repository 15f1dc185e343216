"""Install a wheel into an empty environment and use it as its first user does: `try_wheel.py WHEEL CONSTRAINTS`.

Its commands run in an empty folder outside the tree, so nothing but the wheel can be imported.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMMANDS = ("--version", "env", "demo")


def main(wheel: Path, constraints: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="stof_wheel_") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        bin = folder / "venv" / "bin"
        pip = [bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", constraints, f"{wheel}[hf]"], check=True)
        work = folder / "work"
        work.mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STOF_"))}
        for command in COMMANDS:
            print(f"$ stof {command}", flush=True)
            subprocess.run([bin / "stof", command], cwd=work, env=clean, check=True)


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
