"""Weights in a file: where they lie, that they are mapped, and that nobody writes to them."""

import gc
import zipfile
from pathlib import Path

import pytest
import torch

import stof_tvm
from stof_tvm.saving.weights_file import PAGE, Weights, data_start, is_description, mapped, write_weights

TENSORS = [
    torch.randn(3, 100),
    torch.randn(7, 5).bfloat16(),
    torch.arange(65) % 2 == 0,
    torch.arange(9).to(torch.uint32),
    torch.randn(40, 30).t(),
    torch.randn(1, 1, 2).half(),
]


def write(path: Path, tensors=TENSORS) -> dict:
    with zipfile.ZipFile(path, "w") as archive:
        described = write_weights(archive, "weights", Weights(tensors))
        archive.writestr("another", "member")
    return described


def read(path: Path, described: dict) -> Weights:
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        return mapped(file, archive.getinfo("weights"), described)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_what_is_written_is_read_where_it_lies(tmp_path):
    path = tmp_path / "w.zip"
    found = read(path, write(path)).tensors
    for tensor, wanted in zip(found, TENSORS, strict=True):
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)
        assert tensor.data_ptr() % 64 == 0
    assert is_mapped(path)
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        assert archive.testzip() is None
        assert data_start(file, archive.getinfo("weights")) % PAGE == 0


def test_none(tmp_path):
    path = tmp_path / "w.zip"
    assert list(read(path, write(path, [])).tensors) == []


def test_weights_without_elements(tmp_path):
    """A member of bytes, or of none at all, with tensors that have a length of 0."""
    path = tmp_path / "w.zip"
    for tensors in ([torch.zeros(0, 6)], [torch.ones(3), torch.zeros(2, 0).long(), torch.ones(2)]):
        described = write(path, tensors)
        assert is_description(described)
        for tensor, wanted in zip(read(path, described).tensors, tensors, strict=True):
            assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape and torch.equal(tensor, wanted)


def test_the_mapping_goes_with_the_last_tensor(tmp_path):
    path = tmp_path / "w.zip"
    last = read(path, write(path)).tensors[-1]
    assert is_mapped(path)
    del last
    assert not is_mapped(path)


def test_a_write_does_not_reach_the_file(tmp_path):
    path = tmp_path / "w.zip"
    described = write(path)
    read(path, described).tensors[0].zero_()
    assert torch.equal(read(path, described).tensors[0], TENSORS[0])


class WithEmpty(torch.nn.Module):
    """A model that also returns a constant without elements."""

    def __init__(self):
        super().__init__()
        self.register_buffer("none", torch.zeros(0, 6))

    def forward(self, x):
        return x + 1, self.none


def test_an_engine_that_returns_an_empty_constant_is_loaded(tmp_path):
    x = torch.randn(4, 6)
    stof_tvm.build(WithEmpty().eval(), "llvm", (x,), tuning_logs=False).save(tmp_path / "engine.stof")
    first, none = stof_tvm.load(tmp_path / "engine.stof")(x)
    assert torch.equal(first, x + 1) and none.shape == (0, 6)


class Returned(torch.nn.Module):
    """A model that also returns a weight, and one as another shape."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (torch.nn.Parameter(torch.randn(32, 16)) for _ in range(2))

    def forward(self, x):
        return x @ self.weight, self.weight, self.other.reshape(16, 32)


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    return stof_tvm.build(Returned().eval(), "llvm", (torch.randn(2, 32),), tuning_logs=False)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_caller_may_write_to_a_weight_that_was_returned(engine, tmp_path, is_loaded):
    path, x = tmp_path / "engine.stof", torch.randn(2, 32)
    expected = [out.clone() for out in engine(x)]
    engine.save(path)
    used = stof_tvm.load(path) if is_loaded else engine
    for out in used(x):
        out.zero_()
    assert all(map(torch.equal, used(x), expected))


def test_an_engine_that_is_gone_unmaps_its_file(engine, tmp_path):
    path, x = tmp_path / "engine.stof", torch.randn(2, 32)
    engine.save(path)
    loaded = stof_tvm.load(path)
    outs = loaded(x)
    assert is_mapped(path)
    path.unlink()  # or replaced: the engine keeps what it loaded
    assert all(map(torch.equal, loaded(x), outs))
    del loaded, outs
    gc.collect()
    assert not is_mapped(path)


def test_an_engine_may_be_saved_over_its_own_file(engine, tmp_path):
    path, x = tmp_path / "engine.stof", torch.randn(2, 32)
    engine.save(path)
    loaded = stof_tvm.load(path)
    for _ in range(2):
        loaded.save(path)
    assert all(map(torch.equal, stof_tvm.load(path)(x), engine(x)))
