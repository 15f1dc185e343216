"""What is said where transformers is missing, too old, or there but broken."""

import importlib
import sys

import pytest

from stof_tvm.demo import bert_encoder
from stof_tvm.errors import UnsupportedError

MODULES = ("stof_tvm.transformers", "stof_tvm.generation")
WAYS = {
    **{name: lambda name=name: importlib.import_module(name) for name in MODULES},
    "the demo": bert_encoder,
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """(what needs transformers, a call that imports it)."""
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return request.param, WAYS[request.param]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let `import transformers` run a text, until the test ends."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "transformers.py").write_text
    sys.modules.pop("transformers", None)
    sys.modules.update(before)


def test_it_is_missing(way, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=f"^{way[0]} needs transformers 5, which is not installed: pip install"):
        way[1]()


NAMES = "AttentionInterface = AttentionMaskInterface = BertConfig = BertModel = None\n"


@pytest.mark.parametrize("names", ["", NAMES])
def test_it_is_too_old(way, installed, names):
    """Whether or not what is imported from it is there already."""
    installed(f"__version__ = '4.57.1'\n{names}")
    with pytest.raises(UnsupportedError, match=f"^{way[0]} needs transformers 5, and 4.57.1 is installed: pip install"):
        way[1]()


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("import no_such_tokenizers\n", ModuleNotFoundError, "No module named 'no_such_tokenizers'"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')\n", ImportError, "libcudart.so.13"),
        ("import transformers.no_such_part\n", ModuleNotFoundError, "transformers.no_such_part"),
    ],
)
def test_what_it_needs_itself_is_broken(way, installed, text, kind, why):
    """The cause is seen as it is."""
    installed(text)
    with pytest.raises(kind, match=why) as raised:
        way[1]()
    assert not isinstance(raised.value, UnsupportedError)
