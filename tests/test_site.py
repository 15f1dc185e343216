"""The documentation site: it builds without a warning, its links lead somewhere, and it shows users what is public."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="MkDocs is an optional dependency")

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """What a page links to and what it can be linked at."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors = set(), {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        target = attributes.get("href") or attributes.get("src")
        if target and tag in ("a", "img", "link", "script"):
            self.links.add(unquote(target))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([sys.executable, ROOT / "docs/site.py", folder], capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_links_lead_somewhere_within_the_site(site):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", link) or target.startswith("/"):  # elsewhere; the page for what is not found
                continue
            other = (path.parent / target).resolve() if target else path
            if other.is_dir():
                other /= "index.html"
            if not other.exists() or anchor and other in pages and anchor not in pages[other].anchors:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 30 and dead == []


@pytest.mark.slow
def test_users_find_the_public_interface_and_not_what_is_inside(site):
    api = site / "docs" / "reference"
    for page, names in {
        "engine.html": ("build", "load", "Engine", "Engine.save", "Report"),
        "masks.html": ("Mask", "Mask.dense", "sliding_window", "bigbird", "from_mask_mod", "per_head"),
        "attention.html": ("sparse_attention",),
        "tuning.html": ("tune",),
        "errors.html": ("MaskError",),
    }.items():
        anchors = Page(api / page).anchors
        for name in names:
            assert any(re.search(rf"(^|\.){re.escape(name)}$", anchor) for anchor in anchors), (page, name)
        assert not [anchor for anchor in anchors if re.search(r"\._[a-z]", anchor)], page
    assert "sliding_window" in (site / "search" / "search_index.json").read_text()
    assert not list(site.rglob("relax_passes*.html")) and not list(site.rglob("tir_kernels/*/*.html"))


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?://[^\">\s]+)", path.read_text())
        assert not loaded, (path, loaded)
