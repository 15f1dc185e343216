"""Masks by path: the order of paths, the file, and everything that is no such file."""

import argparse
import json

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.cli import main
from stof_tvm.cli.named.models import load_call
from stof_tvm.errors import InputError, MaskError
from stof_tvm.given_masks import own_masks
from stof_tvm.masks.quality.assignment import FORMAT
from stof_tvm.site_masks import SiteMasks

FOUND = {
    "layers.1.attention": masks.per_head([masks.causal(), masks.vertical_slash(range(0, 40, 2), [0, 1])]),
    "layers": masks.sliding_window(4) | masks.padding([2]) & ~masks.radial((4, 8), 0.5),
    "layers.1.attention#1": masks.sliding_tile((4, 8), 2, (2, 6), text=3),
    "": masks.per_head([masks.document([1] * 50), masks.sliding_window(2**26)]) & masks.causal(),
}


def test_files(tmp_path):
    found = masks.Assignment(FOUND, density=0.25, loss=1e-9)
    found.save(tmp_path / "masks.json")
    read = masks.load(tmp_path / "masks.json")
    assert dict(read) == FOUND and (read.density, read.loss) == (0.25, 1e-9)
    assert repr(read) == "<masks of 4 paths, 25.0% kept>"
    assert (
        "layers.1.attention\n    causal(): heads 0\n    vertical_slash((0, 2, 4, 6, 8, 10, ...), (0, 1)): heads 1"
        in str(read)
    )
    masks.Assignment({"a": masks.causal()}).save(str(tmp_path / "bare.json"))
    assert masks.load(tmp_path / "bare.json").density is None


def test_the_order_of_paths_is_kept(tmp_path):
    first, wide, last = masks.causal(), masks.sliding_window(3), masks.strided(2)
    given = {"layers.1.attn": first, "*.attn": wide, "layers.0": last}
    masks.Assignment(given).save(tmp_path / "masks.json")
    for found in (masks.Assignment(given), masks.load(tmp_path / "masks.json")):
        assert list(found) == list(given)
        for mask in (found, given):
            sites = SiteMasks(mask)
            assert sites.given_for("layers.1.attn", (1, 1, 8, 8)) == wide
            assert sites.given_for("layers.0.attn", (1, 1, 8, 8)) == last


@pytest.mark.parametrize(
    "mask",
    [
        masks.from_tensor(torch.eye(8) > 0),
        masks.from_mask_mod(lambda b, h, i, j: i >= j),
        masks.reordered(masks.causal(), [1, 0]),
    ],
)
def test_masks_without_a_text(mask, tmp_path):
    with pytest.raises(MaskError, match="no text"):
        masks.Assignment({"a": mask}).save(tmp_path / "masks.json")
    assert not (tmp_path / "masks.json").exists()


@pytest.mark.parametrize("values", [{"a": torch.ones(3, 3)}, {3: masks.causal()}])
def test_what_is_no_assignment(values):
    with pytest.raises(MaskError, match="masks go by paths"):
        masks.Assignment(values)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "holds no masks: "),
        ("[]", "it holds no masks of the format"),
        ({"format": "stof_tvm masks 2", "masks": {"a": ["causal()"]}}, "it holds no masks of the format"),
        ({"format": FORMAT}, "it has no masks"),
        ({"format": FORMAT, "masks": {}}, "it has no masks"),
        ({"format": FORMAT, "masks": {"a": ["causal()"]}, "more": 1}, r"it has \['more'\]"),
        ({"format": FORMAT, "masks": {"a": "causal()"}}, "the masks of 'a' must be a list of texts"),
        ({"format": FORMAT, "masks": {"a": []}}, "the masks of 'a' must be a list of texts"),
        ({"format": FORMAT, "masks": {"a": [3]}}, "the masks of 'a' must be a list of texts"),
        ({"format": FORMAT, "masks": {"a": ["casual()"]}}, "there is no mask 'casual'"),
        ({"format": FORMAT, "masks": {"a": ["sparge"]}}, """'sparge' is a rule .*: write {"rule": "sparge"}"""),
        (
            {"format": FORMAT, "masks": {"a": ["per_head([causal(), strided(2)])", "causal()"]}},
            "depends on the head already",
        ),
        (
            {"format": FORMAT, "masks": {"a": ["causal()"]}, "density": 1.5},
            "density=1.5 must be at least 0 and at most 1",
        ),
        ({"format": FORMAT, "masks": {"a": ["causal()"]}, "density": True}, "density=True must be a number"),
        ({"format": FORMAT, "masks": {"a": ["causal()"]}, "loss": "0"}, "loss='0' must be a number"),
        ('{"format": 1, "format": 1}', "is there twice"),
    ],
)
def test_what_is_no_file_of_masks(content, why, tmp_path):
    file = tmp_path / "masks.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(MaskError, match=rf"masks.json.*{why}"):
        masks.load(file)


def test_a_file_that_is_not_there(tmp_path):
    model = torch.nn.Linear(2, 2)
    for read in (masks.load, lambda file: stof_tvm.build(model, "llvm", (torch.ones(2),), mask=file)):
        with pytest.raises(InputError, match=r"the masks .*none.json cannot be read: No such file or directory"):
            read(tmp_path / "none.json")


def test_commands_read_files(tmp_path, capsys):
    assert main(["build", "demo", str(tmp_path / "x.stof"), "--mask", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err


def test_names_of_files_are_masks(tmp_path):
    file = tmp_path / "masks.json"
    masks.Assignment({"a": masks.causal()}).save(file)
    for given in (file, str(file)):
        assert SiteMasks(given).given_for("a.b", (1, 1, 8, 8)) == masks.causal()
        own = own_masks(given)
        assert own == {"a": masks.causal()}  # read now: the file may change
    with pytest.raises(MaskError, match="mask is the text 'causal'"):
        SiteMasks("causal")
    arguments = argparse.Namespace(target=None, mask=str(file))
    (tmp_path / "here_only.py").write_text("def make():\n    return 'model', 'inputs'\n")
    assert load_call(f"{tmp_path / 'here_only.py'}:make", arguments) == ("model", "inputs", {"a": masks.causal()})
