"""Saving and loading: the whole file or a clear error."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import ArtifactError


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
    """A copy with some members' bytes replaced; the checksums stay those of the original."""
    path = tmp_path / "edited.stof"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, members.get(name.partition(".")[0], old.read(name)))
    return path


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

    from stof_tvm.native_log import without_noise

    with without_noise():
        os.write(2, b"a warning\n[1] executable.cc: Scope Saving:\nanother")
    assert capfd.readouterr().err == "a warning\nanother"


def test_manifest_says_what_it_is(case, saved):
    with zipfile.ZipFile(saved) as archive:
        told = json.loads(archive.read("manifest.json"))
    import tvm

    assert told["format"] == 3 and told["tvm_version"] == tvm.__version__
    assert told["project_version"] == stof_tvm.__version__
    assert told["masks"] == [site["mask_digest"] for site in case[0].report().sites]
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
        assert sorted(archive.namelist()) == ["library.so", "manifest.json", "report.json", "signature.json"]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_truncated(saved, tmp_path, fraction):
    path = tmp_path / "short.stof"
    path.write_bytes(saved.read_bytes()[: int(saved.stat().st_size * fraction)])
    with pytest.raises(ArtifactError, match="not a whole saved engine"):
        stof_tvm.load(path)


@pytest.mark.parametrize("member", ["library", "signature", "report"])
def test_altered(saved, tmp_path, member):
    with pytest.raises(ArtifactError, match=f"{member}.* checksum"):
        stof_tvm.load(edited(saved, tmp_path, **{member: b"{}"}))


def test_one_flipped_bit_of_the_library(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "flipped.stof"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="library.so|checksum|CRC"):
        stof_tvm.load(path)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"format": 2}, "format 2; this version reads format 3"),
        ({"tvm_version": "0.26.0"}, "TVM 0.26.0"),
        ({"cpu_features": ["amx-from-the-future"]}, "amx-from-the-future"),
    ],
)
def test_another_version_or_machine(saved, tmp_path, changes, rule):
    with pytest.raises(ArtifactError, match=rule):
        stof_tvm.load(edited(saved, tmp_path, manifest=manifest(saved, **changes)))


def test_a_gpu_that_is_missing(saved, tmp_path):
    import tvm

    if tvm.cuda(0).exist:
        pytest.skip("says what happens without a GPU")
    changed = manifest(saved, device="cuda", target='{"kind": "cuda", "arch": "sm_80"}')
    with pytest.raises(ArtifactError, match="no CUDA GPU"):
        stof_tvm.load(edited(saved, tmp_path, manifest=changed))


@pytest.mark.parametrize("text", ["[]", "{}", "null", "not json", '{"format": 3}'])
def test_a_manifest_that_is_none(saved, tmp_path, text):
    with pytest.raises(ArtifactError):
        stof_tvm.load(edited(saved, tmp_path, manifest=text))


def test_extra_members_are_refused(saved, tmp_path):
    path = edited(saved, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(ArtifactError, match="members"):
        stof_tvm.load(path)


def test_no_such_file_and_not_an_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="no file"):
        stof_tvm.load(tmp_path / "nothing.stof")
    (tmp_path / "text.stof").write_text("hello")
    with pytest.raises(ArtifactError, match="not a whole saved engine"):
        stof_tvm.load(tmp_path / "text.stof")
    with pytest.raises(ArtifactError):
        stof_tvm.load(tmp_path)


def test_a_place_that_cannot_be_written(case, tmp_path):
    with pytest.raises(ArtifactError, match="could not write"):
        case[0].save(tmp_path / "missing" / "model.stof")
    assert not (tmp_path / "missing").exists()


def test_a_linker_that_fails(case, tmp_path, monkeypatch):
    def fail(path):
        raise RuntimeError("Compilation error: no linker")

    monkeypatch.setattr(case[0], "_export_library", fail)
    with pytest.raises(ArtifactError, match="no linker"):
        case[0].save(tmp_path / "model.stof")
    assert list(tmp_path.iterdir()) == []
