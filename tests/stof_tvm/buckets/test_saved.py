"""Files of engines for ranges of shapes: what is loaded is what was saved, in another process too."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm.buckets import workers
from stof_tvm.buckets.engine import BucketEngine
from stof_tvm.buckets.loaded import read_range_report
from stof_tvm.errors import ArtifactError, InputError
from stof_tvm.running.shared_tensors import whole_of
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.disk import full_after
from tests.stof_tvm.buckets.test_engine import BOTH, Language, Numbers, Scaled, assert_close, ids, ranged

OTHERS = [None, 0, -1, 3, 1 << 70, 1e300, "", "s0", [], {}, True, [1], ["Symbol", "q"], ["Integer", 0]]
SHAPES = [(1, 2), (2, 8), (3, 32), (3, 16), (2, 17), (1, 16)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Language().eval()


@pytest.fixture(scope="module")
def engine(model):
    return ranged(model, (ids(2, 8),), BOTH, buckets={"ids[0]": [3], "ids[1]": [16]})


@pytest.fixture(scope="module")
def path(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("range") / "range.stof"
    engine.save(path)
    return path


@pytest.fixture(scope="module")
def loaded(path):
    return stof_tvm.load(path)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same(loaded, engine, model, shape):
    assert isinstance(loaded, BucketEngine)
    found, expected = loaded(ids=ids(*shape)), engine(ids(*shape))
    assert_close(found, model(ids(*shape)))
    assert all(torch.equal(found[name], expected[name]) for name in ("rows", "pooled", "last"))


def test_nothing_is_printed(path, capfd):
    assert len(stof_tvm.load(path)._kept()) > 2
    assert capfd.readouterr() == ("", "")


def test_it_refuses_what_the_engine_refuses(loaded, engine):
    for wrong in (ids(2, 33), ids(4, 8), ids(2, 8).int(), ids(2, 8)[0], ids(2, 1)):
        with pytest.raises(InputError) as expected:
            engine(wrong)
        with pytest.raises(InputError) as error:
            loaded(wrong)
        assert str(error.value) == str(expected.value)
    assert str(loaded.report()) == str(engine.report())


def test_weights_are_there_once(path, engine, loaded):
    tensors = {id(whole_of(x)): whole_of(x) for x in weights(engine)}
    size = sum(x.nbytes for x in tensors.values())
    with zipfile.ZipFile(path) as archive:
        assert size <= archive.getinfo("weights").file_size < size + 64 * len(tensors)
        assert len([name for name in archive.namelist() if name.startswith("bucket-")]) == len(engine._kept())
    places = {x.untyped_storage().data_ptr() for x in weights(loaded)}
    assert len({id(whole_of(x)) for x in weights(loaded)}) == len(tensors) and len(places) == 1  # the mapped file


def weights(engine):
    return [x for bucket in engine._kept().values() for x in bucket._weights.tensors]


def test_tables_of_positions_are_beginnings_of_the_longest(path, loaded):
    parts = [x for x in weights(loaded) if whole_of(x) is not x]
    for part in parts:
        assert torch.equal(whole_of(part).reshape(-1)[: part.numel()], part.reshape(-1))


@torch.no_grad()
def test_another_process_needs_no_model(path, model, tmp_path):
    x = ids(2, 11)
    torch.save([x, model(x)], tmp_path / "case.pt")
    script = f"""
import torch, stof_tvm
x, expected = torch.load({str(tmp_path / "case.pt")!r})
found = stof_tvm.load({str(path)!r})(x)
assert found.keys() == expected.keys() and found["length"] == 11
torch.testing.assert_close(found["rows"], expected["rows"], atol=2e-5, rtol=2e-5)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_loaded_range_can_be_saved(loaded, path, tmp_path):
    again = tmp_path / "again.stof"
    loaded.save(again)
    found, expected = stof_tvm.load(again)(ids(2, 9)), loaded(ids(2, 9))
    assert torch.equal(found["rows"], expected["rows"])


def test_numbers_among_the_results(tmp_path):
    model, x = Numbers().eval(), torch.randn(1, 9, 8)
    shapes = {"x": {1: Dim("n", min=2, max=24)}}
    stof_tvm.build(model, QUICK_LLVM, (x,), dynamic_shapes=shapes, buckets=[12, 24]).save(tmp_path / "range.stof")
    engine = stof_tvm.load(tmp_path / "range.stof")
    for n in (2, 7, 12, 23, 24):
        x = torch.randn(1, n, 8)
        found, expected = engine(x), model(x)
        torch.testing.assert_close(found.pop("y"), expected.pop("y"))
        assert found == expected and [type(v) for v in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.skipif(shutil.which("nvcc") is None or torch.cuda.is_available(), reason="needs nvcc, and no GPU")
def test_a_range_for_a_machine_with_a_gpu(tmp_path):
    shapes = {"x": {0: Dim("n", min=2, max=4)}}
    engine = stof_tvm.build(
        Scaled(), "cuda -arch=sm_80", torch.ones(3, 8), dynamic_shapes=shapes, buckets=[4], verify=False
    )
    engine.save(tmp_path / "range.stof")
    manifest, report = read_range_report(tmp_path / "range.stof")
    assert manifest["project_version"] == stof_tvm.__version__
    assert (report.shapes, list(report.engines)) == (engine.report().shapes, list(engine.report().engines))
    with pytest.raises(ArtifactError, match="bucket-0 of .*range.stof was built for .*sm_80.*, and there is no CUDA"):
        stof_tvm.load(tmp_path / "range.stof")


def test_a_constant_that_json_has_not(tmp_path):
    class Endless(nn.Module):
        def forward(self, x):
            return x * 2, float("inf")

    engine = ranged(Endless(), torch.ones(3, 8), {"x": {0: Dim("n", min=2, max=4)}}, buckets=[4], verify=False)
    with pytest.raises(ArtifactError, match="cannot be stored"):
        engine.save(tmp_path / "range.stof")
    assert [*tmp_path.iterdir()] == []


class Even(nn.Module):
    """It takes even lengths only, where it is exported with one."""

    def forward(self, x):
        return x * 2 if x.shape[1] % 2 == 0 else x.cumsum(1)


def test_what_torch_export_demands_is_stored(tmp_path):
    program = torch.export.export(Even(), (torch.ones(2, 8),), dynamic_shapes={"x": {1: Dim.AUTO(min=2, max=32)}})
    engine = stof_tvm.build(program, QUICK_LLVM, buckets=[16])
    engine.save(tmp_path / "range.stof")
    loaded = stof_tvm.load(tmp_path / "range.stof")
    for length in (2, 8, 16, 32):
        x = torch.randn(2, length)
        assert torch.equal(loaded(x), 2 * x) and torch.equal(engine(x), 2 * x)
    for refuses in (engine, loaded):
        with pytest.raises(InputError, match=r"% 2\) == 0|size\(\)\[1\] % 2 == 0"):
            refuses(torch.ones(2, 9))


def test_buckets_that_forks_built(model, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "WORTH_S", 0.0)
    monkeypatch.setattr(workers, "_most", lambda weights: 2)
    engine = ranged(model, (ids(2, 8),), {"ids": {1: Dim("n", min=2, max=32)}}, buckets=[16, 24], verify=False)
    engine.save(tmp_path / "range.stof")
    loaded = stof_tvm.load(tmp_path / "range.stof")
    for length in (5, 16, 20, 32):
        assert torch.equal(loaded(ids(2, length))["rows"], engine(ids(2, length))["rows"])


def test_descriptions_that_do_not_fit(path, tmp_path):
    """Other JSON under its own checksums: clear errors, whatever stands there."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    numbers, read = random.Random(0), 0
    for case in range(40):
        changed = json.loads(members["range.json"])
        for _ in range(numbers.choice((1, 1, 2))):
            change(changed, numbers)
        other = members | {"range.json": json.dumps(changed).encode()}
        manifest = json.loads(members["manifest.json"])
        manifest["sha256"]["range.json"] = hashlib.sha256(other["range.json"]).hexdigest()
        other["manifest.json"] = json.dumps(manifest).encode()
        other["checksum"] = hashlib.sha256(other["manifest.json"]).hexdigest().encode()
        with zipfile.ZipFile(tmp_path / "other.stof", "w") as archive:
            for name, data in other.items():
                archive.writestr(name, data)
        for reader in (read_range_report, stof_tvm.load):
            try:
                reader(tmp_path / "other.stof")
                read += 1
            except ArtifactError as error:
                assert "other.stof" in str(error), case
    assert read < 40


def change(value, numbers: random.Random) -> None:
    """Put something else in one place of a JSON value."""
    while True:
        key = numbers.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or numbers.random() < 0.25:
            value[key] = numbers.choice(OTHERS)
            return
        value = value[key]


# -- damage ------------------------------------------------------------------------------------------------------------


def altered(path, tmp_path, member: str):
    """A copy of a file in which one byte in the middle of a member is another."""
    copy = tmp_path / "altered.stof"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
        content = archive.read(member)
    start = data.index(content[: 1 << 12], info.header_offset)
    data[start + info.file_size // 2] ^= 1
    copy.write_bytes(data)
    return copy


@pytest.mark.parametrize("member", ["weights", "range.json", "bucket-0", "bucket-1", "manifest.json", "checksum"])
def test_an_altered_byte_is_found(path, tmp_path, member):
    copy = altered(path, tmp_path, member)
    with pytest.raises(ArtifactError, match="altered.stof"):
        stof_tvm.load(copy)


def test_a_part_of_a_file_is_none(path, tmp_path):
    data, copy = path.read_bytes(), tmp_path / "part.stof"
    for size in (0, 10, len(data) // 2, len(data) - 1):
        copy.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match="part.stof"):
            stof_tvm.load(copy)


def test_a_member_too_many_or_too_few(path, tmp_path):
    for left_out, added in (("bucket-0", None), ("weights", None), (None, "bucket-9")):
        copy = tmp_path / "other.stof"
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as other:
            for name in archive.namelist():
                if name != left_out:
                    other.writestr(name, archive.read(name))
            if added:
                other.writestr(added, archive.read("bucket-0"))
        with pytest.raises(ArtifactError, match="other.stof"):
            stof_tvm.load(copy)


def test_a_place_that_takes_no_file(engine, tmp_path):
    for place in (tmp_path, tmp_path / "no" / "range.stof"):
        with pytest.raises(ArtifactError, match="could not write"):
            engine.save(place)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("size", [1 << 10, 1 << 16])
def test_a_full_disk(engine, tmp_path, size):
    path = tmp_path / "range.stof"
    path.write_bytes(b"what was there")
    with full_after(size), pytest.raises(ArtifactError, match=f"could not write {path}: "):
        engine.save(path)
    assert path.read_bytes() == b"what was there" and [*tmp_path.iterdir()] == [path]
