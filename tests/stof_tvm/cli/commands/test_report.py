"""`stof report`: what is in a saved engine, without running it."""

import hashlib
import json
import zipfile

import pytest
import torch

import stof_tvm
from stof_tvm.saving.artifact import MEMBERS

TARGET = '{"kind": "cuda", "arch": "sm_80"}'
NO_CHECKSUMS = dict.fromkeys(MEMBERS, "0")


def test_json_and_text(stof, work):
    report = stof_tvm.load("encoder.stof").report()
    status, found, errors = stof("report", "encoder.stof", "--json")
    assert (status, errors) == (0, "") and found["report"] == json.loads(json.dumps(report.to_dict()))
    assert found["manifest"]["project_version"] == stof_tvm.__version__
    assert found["bytes"] == (work / "encoder.stof").stat().st_size
    status, text, _ = stof("report", "encoder.stof")
    assert status == 0 and str(report) in text and text.startswith("encoder.stof: ")


def test_engines_for_other_machines_are_told_too(stof, work, tmp_path):
    path = rewritten(work / "encoder.stof", tmp_path, device="cuda", target=TARGET, cpu_features=["no_such_feature"])
    assert stof("report", path)[0] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_models.py", "is not a whole saved engine, as engine.save writes it: it is no zip archive"),
        ("q.pt", "is not a whole saved engine, as engine.save writes it: torch.save wrote it"),
        ("missing", "no file"),
    ],
)
def test_what_is_no_engine(stof, work, name, why):
    torch.save(torch.ones(2), work / "q.pt")
    status, text, errors = stof("report", name)
    assert (status, text) == (1, "") and errors.count("\n") == 1 and why in errors


@pytest.mark.parametrize(
    ("changes", "why"), [({"format": 0}, "has format 0"), ({"sha256": NO_CHECKSUMS}, "was altered")]
)
def test_an_altered_engine_is_refused(stof, work, tmp_path, changes, why):
    status, text, errors = stof("report", rewritten(work / "encoder.stof", tmp_path, **changes))
    assert (status, text) == (1, "") and errors.count("\n") == 1 and why in errors


def rewritten(saved, folder, **changes):
    """A copy with another manifest, and a report for its target."""
    with zipfile.ZipFile(saved) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    members["report.json"] = json.dumps(
        json.loads(members["report.json"]) | {"target": changes.get("target", manifest["target"])}
    )
    manifest["sha256"]["report.json"] = checksum(members["report.json"])
    members["manifest.json"] = json.dumps(manifest | changes)
    members["checksum"] = checksum(members["manifest.json"])
    with zipfile.ZipFile(folder / "rewritten.stof", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return folder / "rewritten.stof"


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
