"""A file names types, and nothing that it names is imported unless it is an output class of transformers."""

import collections
import enum
import json
import sys

import pytest
from torch.utils import _pytree as pytree

from stof_tvm.errors import ArtifactError
from stof_tvm.saving.nesting import dump_nesting, load_nesting

LEAF = {"type": None, "context": None, "children_spec": []}
Pair = collections.namedtuple("Pair", "first second")


def nesting(kind, context="null", children=(LEAF,)):
    return json.dumps([1, {"type": kind, "context": context, "children_spec": list(children)}])


@pytest.mark.parametrize("value", [(1, [2]), {"a": 1, "b": (2,)}, collections.OrderedDict(x=1), [[], ()], 3])
def test_round_trip(value):
    spec = pytree.tree_structure(value)
    assert load_nesting(dump_nesting(spec)) == spec


def test_named_tuples_that_are_registered():
    spec = pytree.tree_structure((Pair(1, 2),))
    pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    assert load_nesting(dump_nesting(spec)) == spec


Three = collections.namedtuple("Three", "x y z")


def test_named_tuples_that_are_not_registered():
    spec = pytree.tree_structure([Three(1, (2, 3), {"a": 4})])
    assert load_nesting(dump_nesting(spec)) == spec
    elsewhere = load_nesting(dump_nesting(spec).replace(".Three(", ".Elsewhere("))
    (made,) = pytree.tree_unflatten([1, 2, 3, 4], elsewhere)
    assert made == (1, (2, 3), {"a": 4}) and made.y == (2, 3) and type(made).__name__ == "Elsewhere"
    assert load_nesting(dump_nesting(elsewhere)) == elsewhere


@pytest.mark.parametrize("fields", ["x", "x,y,z,w", "x,y,class", "x,y,_z", "x,x,y", "x,y,z)or(1"])
def test_named_tuples_of_fields_that_are_none(fields):
    text = dump_nesting(pytree.tree_structure(Three(1, 2, 3)))
    with pytest.raises((ValueError, ArtifactError)):
        load_nesting(text.replace(".Three(x,y,z)", f".Forged({fields})"))


class Planted:
    """A module on the path that must never be imported."""

    def __init__(self, folder, monkeypatch, name="planted_module"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(str(folder))
        self.name = name

    def is_imported(self):
        return self.name in sys.modules


FORGED = {
    "a type": lambda name: nesting(f"{name}.Output"),
    "a type of transformers": lambda name: nesting(f"transformers.{name}.Output"),
    "a module of transformers": lambda _: nesting("transformers.utils.hub.PushToHubMixin"),
    "a class that is no output": lambda _: nesting("transformers.models.bert.modeling_bert.BertModel"),
    "a path": lambda name: nesting(f"transformers.models..{name}.modeling_x.Y"),
    "an enum": lambda name: nesting("builtins.dict", json.dumps([{"__enum__": True, "fqn": f"{name}:A", "name": "x"}])),
    "an enum as context": lambda name: nesting(
        "builtins.dict", json.dumps({"__enum__": True, "fqn": f"{name}:A", "name": "x"})
    ),
    "a factory": lambda name: nesting(
        "collections.defaultdict",
        {"default_factory_module": name, "default_factory_name": "f", "dict_context": ["a"]},
    ),
    "within": lambda name: nesting("builtins.tuple", "null", [json.loads(nesting(f"{name}.Output"))[1]]),
    "a deep one": lambda name: "[1, " + '{"type": "builtins.tuple", "children_spec": [' * 5000 + "]}" * 5000 + "]",
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged(kind, tmp_path, monkeypatch):
    planted = Planted(tmp_path, monkeypatch)
    with pytest.raises((ArtifactError, ValueError)):
        load_nesting(FORGED[kind](planted.name))
    assert not planted.is_imported()


def test_what_could_not_be_loaded_again_is_not_stored():
    with pytest.raises(ArtifactError, match="defaultdict"):
        dump_nesting(pytree.tree_structure(collections.defaultdict(list, a=1)))

    class Colour(enum.Enum):
        RED = 1

    with pytest.raises((ArtifactError, ValueError)):
        dump_nesting(pytree.tree_structure({Colour.RED: 1}))
