"""Builds the documentation site, guides and public interface with search: `python docs/site.py [build/docs]`.

Pages stay where readers of the repository find them, and link to each other and to sources as they do there.  So all
pages are staged with the files that they link to, in the tree's own arrangement, and MkDocs builds from that; a link
to a folder becomes one to its README, or plain text.  Exits with 1 where MkDocs warns: a page without a place, a link
or an anchor that leads nowhere, an object that cannot be documented.
"""

import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "tutorials/*.md", "tutorials/*.ipynb")
PAGES += ("benchmarks/**/*.md", "tir_kernels/README.md")
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
NOTEBOOK_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)\.(md|ipynb)(?=[)#])")  # MkDocs does not see these


def stage(folder: Path) -> None:
    """Copy every page into `folder`, and beside the pages the files that they link to."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)}):
        copy = _copy(page, folder)
        if page.suffix == ".md":
            copy.write_text(_relinked(page, folder))
        else:
            copy.write_text(NOTEBOOK_LINK.sub(_to_html, _relinked(page, folder)))


def _copy(file: Path, folder: Path) -> Path:
    copy = folder / file.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    return copy


def _relinked(page: Path, folder: Path) -> str:
    """The page's text with its links to folders resolved; links to files bring these into `folder`."""

    def resolve(link: re.Match) -> str:
        target = (page.parent / link["path"]).resolve()
        if target.is_dir():
            readme = target / "README.md"
            return f"{link['text']}({link['path'].rstrip('/')}/README.md)" if readme.exists() else link["text"][1:-1]
        if target.is_file() and target.suffix not in (".md", ".ipynb"):
            _copy(target, folder)
        return link[0]

    def outside_code(part: str) -> str:
        return LINK.sub(resolve, part)

    # A link's text may be a code span, so only blocks of code are left alone.
    parts = re.split(r"(^```.*?^```$)", page.read_text(), flags=re.S | re.M)
    return "".join(part if part.startswith("```") else outside_code(part) for part in parts)


def _to_html(link: re.Match) -> str:
    """Where a page is on the site: a folder's README is its index."""
    path = link["path"]
    return (path[: -len("README")] + "index" if path.endswith("README") else path) + ".html"


def write(folder: Path) -> None:
    """Build the site into `folder`.  mkdocs.exceptions.Abort where anything is amiss; what, is on stderr."""
    with tempfile.TemporaryDirectory() as pages:  # of its own: two builds may run at once
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), docs_dir=pages)
        stage(Path(config.docs_dir))
        build(config)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    try:
        write(out)
    except Abort as abort:
        sys.exit(str(abort))
    print(out / "index.html")
