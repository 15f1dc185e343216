"""Kernels compiled where they were built: the loader takes what is ready, and compiles the rest for the same GPU."""

import json
import shutil
import zipfile

import pytest
import torch
import torch.nn.functional as F
import tvm

import stof_tvm
from tir_kernels.cuda import compile as cuda_compile
from tir_kernels.cuda import machine_code as cuda_code
from tir_kernels.cuda.machine_code import machine_code, ready_code
from tir_kernels.errors import ArtifactError

no_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
no_driver = pytest.mark.skipif(tvm.cuda(0).exist, reason="TVM compiles for the GPU here itself")


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.fixture(scope="module")
def engine():
    return stof_tvm.build(Attend(), "cuda -arch=sm_90a", tuple(torch.randn(3, 1, 1, 16, 16).half()))


@pytest.fixture
def compiled(monkeypatch):
    """What nvcc is asked to compile, and for what; it gives the source back."""
    asked = []
    monkeypatch.setattr(cuda_compile, "have_nvcc", lambda: True)
    monkeypatch.setattr(cuda_compile, "run_nvcc", lambda s, _, options: asked.append((s, options)) or (s.encode(), ""))
    return asked


@no_driver
def test_ready_code_needs_no_compiler(engine, compiled):
    packed = machine_code(engine._library, "sm_90a")
    assert [options for _, options in compiled] == [["-gencode", "arch=compute_90a,code=sm_90a"]]
    with ready_code(packed, "sm_90a"):
        assert cuda_compile.compile_cuda(engine.cuda_source()) == engine.cuda_source().encode()
    assert len(compiled) == 1


@no_driver
def test_other_source_is_compiled_for_the_architecture_of_the_engine(compiled):
    with ready_code(b"", "sm_90a"):
        cuda_compile.compile_cuda("// another")
    assert compiled == [("// another", ["-gencode", "arch=compute_90a,code=sm_90a"])]
    assert cuda_code.ready.get() == ({}, None)


@no_driver
def test_code_that_is_cut_off_is_refused(engine, compiled):
    packed = machine_code(engine._library, "sm_90a")
    for size in (len(packed) - 1, 10):
        with pytest.raises(ArtifactError, match="cut off"), ready_code(packed[:size], "sm_90a"):
            pass


@no_nvcc
@no_driver
def test_a_saved_engine_has_machine_code(engine, tmp_path):
    engine.save(tmp_path / "x.stof")
    with zipfile.ZipFile(tmp_path / "x.stof") as archive:
        packed = archive.read("kernels")
        assert "kernels" in json.loads(archive.read("manifest.json"))["sha256"]
    with ready_code(packed, "sm_90a"):
        assert b"\x7fELF" in cuda_compile.compile_cuda(engine.cuda_source())


@no_driver
def test_without_nvcc_a_saved_engine_has_the_source_only(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_compile, "have_nvcc", lambda: False)
    engine.save(tmp_path / "x.stof")
    with zipfile.ZipFile(tmp_path / "x.stof") as archive:
        assert archive.read("kernels") == b""
