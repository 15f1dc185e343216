"""Saving and loading: the whole file or a clear error."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import ArtifactError, DeviceError
from stof_tvm.running.machine import cpu_features
from stof_tvm.saving import artifact
from stof_tvm.saving.weights_file import data_start


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(1, 24, 16)
    return stof_tvm.build(model, "llvm", (x,), mask=masks.causal()), x


@pytest.fixture(scope="module")
def saved(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "model.stof"
    case[0].save(path)
    return path


def edited(saved, tmp_path, **members):
    """A copy with some members' bytes replaced; the checksums stay those of the original, but that of a manifest."""
    path = tmp_path / "edited.stof"
    if "manifest" in members:
        members["checksum"] = hashlib.sha256(members["manifest"].encode()).hexdigest()
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, members.get(name.partition(".")[0], old.read(name)))
    return path


def resealed(saved, tmp_path, member, change):
    """A copy in which `change` was made to a JSON member, and all checksums are those of what is there."""
    with zipfile.ZipFile(saved) as archive:
        text = json.dumps(change(json.loads(archive.read(f"{member}.json"))))
        sha256 = json.loads(archive.read("manifest.json"))["sha256"]
    sha256[f"{member}.json"] = hashlib.sha256(text.encode()).hexdigest()
    return edited(saved, tmp_path, **{member: text, "manifest": manifest(saved, sha256=sha256)})


def manifest(saved, **changes):
    with zipfile.ZipFile(saved) as archive:
        return json.dumps({**json.loads(archive.read("manifest.json")), **changes})


def test_round_trip(case, saved):
    engine, x = case
    loaded = stof_tvm.load(saved)
    torch.testing.assert_close(loaded(x), engine(x), atol=0, rtol=0)
    assert loaded.report() == engine.report()
    again = saved.with_name("again.stof")
    loaded.save(again)
    torch.testing.assert_close(stof_tvm.load(again)(x), engine(x), atol=0, rtol=0)


def test_saving_and_loading_are_silent(case, tmp_path, capfd):
    case[0].save(tmp_path / "model.stof")
    stof_tvm.load(tmp_path / "model.stof")(case[1])
    told = capfd.readouterr()
    assert told.out == "" and told.err == ""


def test_other_messages_on_stderr_are_passed_on(capfd):
    import os

    from stof_tvm.running.native_log import without_noise

    with without_noise():
        os.write(2, b"a warning\n[1] executable.cc: Scope Saving:\nanother")
    assert capfd.readouterr().err == "a warning\nanother"


def test_manifest_says_what_it_is(case, saved):
    with zipfile.ZipFile(saved) as archive:
        told = json.loads(archive.read("manifest.json"))
    import tvm

    assert told["format"] == 10 and told["tvm_version"] == tvm.__version__
    assert told["project_version"] == stof_tvm.__version__
    assert told["masks"] == [site.mask_digest for site in case[0].report().sites]
    assert json.loads(told["target"])["kind"] == "llvm"


def test_a_fresh_process_needs_neither_the_model_nor_the_compiler(saved, case, tmp_path):
    engine, x = case
    torch.save({"x": x, "y": engine(x)}, tmp_path / "case.pt")
    code = (
        "import sys, torch, stof_tvm\n"
        f"case = torch.load({str(tmp_path / 'case.pt')!r})\n"
        f"out = stof_tvm.load({str(saved)!r})(case['x'])\n"
        "assert torch.equal(out, case['y'])\n"
        "compiler = ('stof_tvm.compiler', 'stof_tvm.frontend', 'stof_tvm.tuning', 'stof_tvm.masks', 'relax_passes')\n"
        "found = [name for name in sys.modules if name.startswith((*compiler, 'xgboost', 'transformers'))]\n"
        "assert not found, found\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_no_member_is_pickled(saved):
    with zipfile.ZipFile(saved) as archive:
        names = ["checksum", "kernels", "library.so", "manifest.json", "report.json", "signature.json", "weights"]
        assert sorted(archive.namelist()) == names


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_truncated(saved, tmp_path, fraction):
    path = tmp_path / "short.stof"
    path.write_bytes(saved.read_bytes()[: int(saved.stat().st_size * fraction)])
    with pytest.raises(ArtifactError, match="not a whole saved engine"):
        stof_tvm.load(path)


@pytest.mark.parametrize("member", ["library", "signature", "report", "weights"])
def test_altered(saved, tmp_path, member):
    with pytest.raises(ArtifactError, match=f"{member}.* checksum"):
        stof_tvm.load(edited(saved, tmp_path, **{member: b"{}"}))


@pytest.mark.parametrize("member", ["library.so", "weights"])
def test_one_flipped_bit(saved, tmp_path, member):
    data = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive, open(saved, "rb") as file:
        info = archive.getinfo(member)
        data[data_start(file, info) + info.file_size // 2] ^= 1
    path = tmp_path / "flipped.stof"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{member}.* checksum|CRC.*{member}"):
        stof_tvm.load(path)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"format": 3}, "format 3; this version reads format 10: build the engine again"),
        ({"tvm_version": "0.26.0"}, "TVM 0.26.0"),
        ({"cpu_features": ["amx-from-the-future"]}, "amx-from-the-future"),
    ],
)
def test_another_version_or_machine(saved, tmp_path, changes, rule):
    with pytest.raises(ArtifactError, match=rule):
        stof_tvm.load(edited(saved, tmp_path, manifest=manifest(saved, **changes)))


def test_the_format_before_this_one_is_told_by_its_version(saved, tmp_path):
    """Not by the members that it lacked."""
    old = edited(saved, tmp_path, manifest=manifest(saved, format=6))
    path = tmp_path / "format6.stof"
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            if name != "kernels":
                archive.writestr(name, source.read(name))
    for read in (stof_tvm.load, artifact.read_report):
        with pytest.raises(ArtifactError, match="format 6; this version reads format 10: build the engine again"):
            read(path)


def test_every_machine_runs_code_for_the_first_of_its_kind(saved, tmp_path):
    """What is slow on some CPU, as LLVM tells it, is no instruction that another lacks."""
    for cpu in ("x86-64", "haswell", "znver4", "sapphirerapids"):
        features = cpu_features(json.dumps({"kind": "llvm", "mcpu": cpu}))
        assert "sse2" in features and not any("slow" in name or "fusion" in name for name in features)
    generic = cpu_features(json.dumps({"kind": "llvm", "mcpu": "x86-64"}))
    assert stof_tvm.load(edited(saved, tmp_path, manifest=manifest(saved, cpu_features=generic)))


def test_an_engine_for_another_cpu_is_not_run(case):
    """Its instructions would end the process."""
    engine = stof_tvm.build(torch.nn.ReLU(), "llvm -mcpu=diamondrapids", (case[1],))
    if not engine.report().verification.detail.startswith("no such device"):
        pytest.skip("this CPU has them all")
    with pytest.raises(DeviceError, match="diamondrapids.*, and this CPU lacks"):
        engine(case[1])


def test_a_gpu_that_is_missing(saved, tmp_path):
    import tvm

    if tvm.cuda(0).exist:
        pytest.skip("says what happens without a GPU")
    changed = manifest(saved, device="cuda", target='{"kind": "cuda", "arch": "sm_80"}')
    with pytest.raises(ArtifactError, match="no CUDA GPU"):
        stof_tvm.load(edited(saved, tmp_path, manifest=changed))


def test_a_manifest_without_its_checksum(saved, tmp_path):
    changed = manifest(saved, memory=[1 << 40])
    with zipfile.ZipFile(saved) as archive:
        checksum = archive.read("checksum")
    path = edited(saved, tmp_path, manifest=changed)
    assert stof_tvm.load(path)  # a checksum tells damage, not malice
    (tmp_path / "again").mkdir()
    with pytest.raises(ArtifactError, match="manifest.json .* does not have its checksum"):
        stof_tvm.load(edited(path, tmp_path / "again", checksum=checksum))


@pytest.mark.parametrize("text", ["[]", "{}", "null", "not json", '{"format": 5}', "[" * 100_000])
def test_a_manifest_that_is_none(saved, tmp_path, text):
    with pytest.raises(ArtifactError):
        stof_tvm.load(edited(saved, tmp_path, manifest=text))


LEAF = {"name": "y", "tensor": 0}
NO_CHILDREN = {"type": None, "context": None, "children_spec": []}
PAIR = json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [NO_CHILDREN] * 2}])


@pytest.mark.parametrize(
    "member, change",
    [
        ("signature", lambda data: data | {"inputs": []}),
        ("signature", lambda data: data | {"in_leaves": [{"name": "src", "tensor": 7}]}),
        ("signature", lambda data: data | {"out_leaves": [LEAF, LEAF | {"tensor": 0.0}], "out_spec": PAIR}),
        ("signature", lambda data: data | {"outputs": [data["outputs"][0] | {"dtype": "no_grad"}]}),
        ("signature", lambda data: data | {"in_spec": '[1, {"type": null, "context": null, "children_spec": []}]'}),
        ("report", lambda data: data | {"sites": [{"rewritten": True}]}),
        ("report", lambda data: data | {"segments": [{}]}),
        ("report", lambda data: data | {"target": '{"kind": "cuda"}'}),
    ],
)
def test_parts_that_make_no_engine(saved, tmp_path, member, change, monkeypatch):
    """Told before the library is loaded, although every checksum is right."""
    monkeypatch.setattr("stof_tvm.saving.artifact.load_library", None)
    with pytest.raises(ArtifactError):
        stof_tvm.load(resealed(saved, tmp_path, member, change))


def test_members_that_are_not_those_of_an_engine_are_refused(saved, tmp_path):
    for name in ("../evil.py", "/tmp/evil.py", "library.so"):
        path = edited(saved, tmp_path)
        with zipfile.ZipFile(path, "a") as archive, pytest.warns() if name == "library.so" else nullcontext():
            archive.writestr(name, "")
        with pytest.raises(ArtifactError, match="members"):
            stof_tvm.load(path)
    assert not (tmp_path / ".." / "evil.py").exists()


def test_a_member_that_would_unpack_to_more_than_the_file_is_refused(saved, tmp_path):
    path = tmp_path / "bomb.stof"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) if name != "report.json" else b" " * 10_000_000)
    with pytest.raises(ArtifactError, match="is compressed"):
        stof_tvm.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: None,
        lambda weights: {"tensors": weights["tensors"]},
        lambda weights: weights | {"tensors": weights["tensors"][1:]},
        lambda weights: weights | {"tensors": [["no_grad", [16, 48]]]},
        lambda weights: weights | {"tensors": [["float32", [-16, 48]]]},
        lambda weights: weights | {"tensors": [["float32", [16, 48.0]]]},
        lambda weights: weights | {"tensors": [["float32", [1 << 60, 1 << 60]]]},
    ],
)
def test_weights_that_are_not_described(saved, tmp_path, change, monkeypatch):
    monkeypatch.setattr("stof_tvm.saving.artifact.load_library", None)
    weights = json.loads(manifest(saved))["weights"]
    with pytest.raises(ArtifactError, match="manifest is malformed|bytes, which are not those of its tensors"):
        stof_tvm.load(edited(saved, tmp_path, manifest=manifest(saved, weights=change(weights))))


def test_a_file_that_was_packed_again(case, saved, tmp_path):
    """Its weights lie anywhere, where compiled code cannot read them."""
    engine, x = case
    path = edited(saved, tmp_path)
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        assert data_start(file, archive.getinfo("weights")) % 64
    assert torch.equal(stof_tvm.load(path)(x), engine(x))


def test_a_file_that_was_altered_since_it_was_loaded(saved, tmp_path):
    path = tmp_path / "mine.stof"
    path.write_bytes(saved.read_bytes())
    loaded = stof_tvm.load(path)
    with zipfile.ZipFile(path) as archive, open(path, "rb+") as file:
        file.seek(data_start(file, archive.getinfo("weights")))
        file.write(b"another!")
    with pytest.raises(ArtifactError, match="was altered"):
        loaded.save(tmp_path / "again.stof")
    assert not (tmp_path / "again.stof").exists()


def test_no_such_file_and_not_an_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="no file"):
        stof_tvm.load(tmp_path / "nothing.stof")
    (tmp_path / "text.stof").write_text("hello")
    with pytest.raises(ArtifactError, match="not a whole saved engine"):
        stof_tvm.load(tmp_path / "text.stof")
    for name, write, what in (
        ("q.pt", lambda path: torch.save(torch.ones(2), path), "torch.save wrote it"),
        ("old.pt", lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "it is no zip archive"),
        ("x.npz", lambda path: np.savez(path, x=np.ones(2)), r"a zip archive of \['x.npy'\]"),
        ("none.zip", lambda path: zipfile.ZipFile(path, "w").close(), r"a zip archive of \[\]"),
    ):
        write(tmp_path / name)
        with pytest.raises(ArtifactError, match=f"{name} is not a whole saved engine, as .*: .*{what}"):
            stof_tvm.load(tmp_path / name)
    with pytest.raises(ArtifactError, match=f"{tmp_path} is a folder"):
        stof_tvm.load(tmp_path)


@pytest.mark.parametrize(
    "place, why",
    [
        ("missing/model.stof", "there is no folder .*missing$"),
        ("folder", "folder: it is a folder; name a file in it"),
        ("file/model.stof", "Not a directory"),
        ("/proc/model.stof", "/proc/model.stof: No such file or directory"),
    ],
)
def test_a_place_that_cannot_be_written(case, tmp_path, place, why):
    """The message names the user's file alone, not what lies beside it until it is whole."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=f"could not write .*{why}") as raised:
        case[0].save(tmp_path / place)
    assert f".{Path(place).name}." not in str(raised.value)
    assert str(raised.value).count(str(tmp_path / place)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_linker_that_fails(case, tmp_path, monkeypatch):
    def fail(path):
        raise RuntimeError(f"Compilation error: no linker for {path}")

    monkeypatch.setattr(case[0], "_export_library", fail)
    with pytest.raises(ArtifactError, match="no linker") as raised:
        case[0].save(tmp_path / "model.stof")
    assert ".model.stof." not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
