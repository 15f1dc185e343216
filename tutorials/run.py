"""Run the notebooks of this folder from top to bottom and keep what they print and draw.

    python tutorials/run.py                      # all, in place
    python tutorials/run.py 02_masks.ipynb       # some

Each runs in a process and a working directory of its own.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BACKEND = "module://matplotlib_inline.backend_inline"
SECONDS = 600  # for one cell, or for a process to start, on a busy machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run.  nbclient's CellExecutionError where a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="stof_tutorial_") as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        search_path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
        # Neither the user's profile and backend nor a progress bar that would rather be a widget decides what a cell
        # prints.
        own = {"PYTHONPATH": search_path, "IPYTHONDIR": folder, "PYTHONWARNINGS": "ignore:IProgress not found"}
        client.execute(env={**os.environ, **own, "MPLBACKEND": BACKEND})
    notebook.metadata = METADATA
    for picture in pictures(notebook):
        picture["image/png"] = in_few_colors(picture["image/png"])
    return notebook


def pictures(notebook) -> list[dict]:
    """The outputs with a PNG, by MIME type."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"] for output in outputs if "image/png" in output.get("data", {})]


def in_few_colors(png: str) -> str:
    """A third of the size: plots need no more than 64 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")
    image = image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)  # the one that keeps transparency
    small = io.BytesIO()
    image.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main(names: list[str]) -> None:
    for path in [FOLDER / Path(name).name for name in names] or NOTEBOOKS:
        print(path.name, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
