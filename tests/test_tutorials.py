"""The notebooks run from top to bottom; what is committed of their output is whole and names no machine."""

import base64
import re
import socket
from pathlib import Path

import nbformat
import pytest

from tutorials.run import NOTEBOOKS, executed, pictures

ROOT = Path(__file__).parent.parent
NAMES = [path.name for path in NOTEBOOKS]
LARGEST = 150_000  # bytes of a notebook
PATH = re.compile(r"(?<![\w.<])/(?:home|root|tmp|usr|opt|var|work|mnt|Users|data|srv|proc)\b")


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=NAMES)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def printed(notebook) -> str:
    """Everything that cells printed or returned, but the pictures."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            found += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # as a command that drew in this process leaves it
    fresh = executed(path)
    assert [cell.execution_count for cell in fresh.cells if cell.cell_type == "code"] == list(
        range(1, sum(cell.cell_type == "code" for cell in fresh.cells) + 1)
    )
    committed = nbformat.read(path, as_version=4)
    assert kinds_of_output(fresh) == kinds_of_output(committed), "run `make tutorials`"
    assert fresh.metadata == committed.metadata and not PATH.search(printed(fresh))


def kinds_of_output(notebook) -> list:
    """Which cells print, and which draw."""
    return [
        (cell.id, [output.output_type for output in cell.outputs])
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_eight_and_the_table_of_contents_names_each():
    contents = (ROOT / "tutorials" / "README.md").read_text()
    assert len(NAMES) == 8 and all(f"({name})" in contents for name in NAMES)


def test_it_is_short_and_its_cells_have_names(notebook):
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 25
    assert all(re.fullmatch(r"[a-z0-9-]+", cell.id) for cell in notebook.cells)
    assert notebook.cells[0].source.startswith("# ")


def test_it_checks_what_it_claims(notebook):
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert len(re.findall(r"^\s*(?:assert |torch\.testing\.assert)", code, re.M)) >= 4


def test_committed_outputs_are_whole(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and all(output.output_type in ("stream", "display_data") for output in outputs)
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert "Traceback" not in printed(notebook)


def test_committed_outputs_name_no_machine(notebook):
    text = printed(notebook)
    assert not PATH.search(text) and not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(ROOT) not in nbformat.writes(notebook)


def test_pictures_are_small(notebook):
    assert len(nbformat.writes(notebook)) < LARGEST
    for picture in pictures(notebook):
        assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_links_lead_somewhere(path):
    text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")
    targets = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text)
    assert not [target for target in targets if not (path.parent / target).exists()]


def test_the_search_for_paths_finds_some():
    assert PATH.search("saved to /tmp/x") and PATH.search('File "/home/me/a.py"')
    assert not PATH.search("a.py, tmp/x, 3 / 4")
