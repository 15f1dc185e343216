"""`build`'s arguments beside the mask: what is taken for an example call, and one clear error for the rest."""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import ExportError, InputError, NotRewrittenError, UnsupportedError
from stof_tvm.saving.artifact import read_report
from stof_tvm.verification.verify import SKIPPED
from tests.models.quick_llvm import QUICK_LLVM

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Sums(NamedTuple):
    total: torch.Tensor
    double: torch.Tensor


@dataclasses.dataclass
class Unregistered:
    total: torch.Tensor


@dataclasses.dataclass
class Registered:
    total: torch.Tensor


class Model(torch.nn.Module):
    def __init__(self, returns=None):
        super().__init__()
        self.linear, self.returns = torch.nn.Linear(4, 4), returns

    def forward(self, x, y=None, parts=None, k: int = 1):
        x = self.linear(x) * k
        x = x if y is None else x + y
        x = x if parts is None else x + parts["left"]
        return x if self.returns is None else self.returns(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def built(model, *args, **kwargs):
    return stof_tvm.build(model, QUICK_LLVM, *args, **kwargs)


@torch.no_grad()
def test_any_mapping_is_keyword_arguments(model):
    inputs = collections.UserDict(x=X, y=X)
    torch.testing.assert_close(built(model, inputs)(**inputs), model(**inputs))
    model.example_inputs = inputs
    torch.testing.assert_close(built(model)(X, X), model(X, X))


@torch.no_grad()
def test_any_mapping_in_the_place_of_a_dict(model):
    engine = built(model, (X,), example_kwargs=collections.UserDict(parts={"left": X}))
    expected = model(X, parts={"left": X})
    torch.testing.assert_close(engine(X, parts=collections.UserDict(left=X)), expected)
    with pytest.raises(InputError, match="not nested as in the export"):
        engine(X, parts=collections.UserDict(right=X))


def test_a_mapping_in_the_place_of_a_tensor(model):
    with pytest.raises(InputError, match=r"x must be a float32 tensor .* got a dict: unpack it, engine\(\*\*inp"):
        built(model, (X,))(collections.UserDict(x=X))


WRONG = {
    "target and inputs swapped": (
        lambda m: stof_tvm.build(m, (X,), "llvm"),
        "got tuple, .* got str: are the two swapped",
    ),
    "a mapping's name": (lambda m: built(m, "x"), "are the two swapped"),
    "inputs": (lambda m: built(m, 3), "example_inputs must be a tuple, a tensor or a dict, got int 3"),
    "keyword inputs": (
        lambda m: built(m, X, example_kwargs=(1,)),
        r"example_kwargs must be a dict .* got tuple \(1,\)",
    ),
    "verify": (lambda m: built(m, X, verify="no"), "verify must be True or False, got str 'no'"),
    "strict": (lambda m: built(m, X, strict=1), "strict must be True or False, got int 1"),
    "progress": (lambda m: built(m, X, progress=None), "progress must be True or False, got NoneType None"),
    "a constant": (
        lambda m: built(m, X, example_kwargs={"k": 3})(X, k=2),
        "with 3: for other .* engine, with k=2 among",
    ),
    "dtypes": (
        lambda m: built(m.half(), X),
        r"aten.linear.default in linear multiplies x \(float32\) by p_linear_weight \(float16\).*model.float\(\)",
    ),
    "an article": (lambda m: built(m, X)(X.long()), "got an int64 tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, model):
    call, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        call(model)


@torch.no_grad()
def test_switches_of_numpy(model):
    assert built(model, X, verify=np.bool_(False), strict=np.bool_(True)).report().verification == SKIPPED


@pytest.mark.parametrize("inputs", [(X[:1],), {"x": X.half()}, (X, X)])
def test_example_inputs_that_an_exported_program_was_not_made_for(model, inputs):
    program = torch.export.export(model, (X,))
    with pytest.raises(InputError, match="do not fit the exported program"):
        built(program, inputs)


@torch.no_grad()
@pytest.mark.parametrize("inputs", [X, (X,), {"x": X}])
def test_example_inputs_of_an_exported_program(model, inputs):
    torch.testing.assert_close(built(torch.export.export(model, (X,)), inputs)(X), model(X))


@pytest.mark.parametrize("is_exported", [False, True])
def test_autocast_is_refused(model, is_exported):
    given = torch.export.export(model, (X,)) if is_exported else model
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedError, match=r"autocast: .*model.bfloat16\(\)"),
    ):
        built(given, (X,))


def test_autocast_of_another_device_does_not_matter(model):
    with torch.autocast("cuda", torch.float16, enabled=True):
        built(model, (X,))


@torch.no_grad()
def test_named_tuples_come_back(tmp_path):
    model = Model(lambda x: Sums(x, 2 * x)).eval()
    engine = built(model, (X,))
    engine.save(tmp_path / "sums.stof")
    for found in (engine(X), stof_tvm.load(tmp_path / "sums.stof")(X)):
        assert isinstance(found, Sums)
        torch.testing.assert_close(found.double, model(X).double)


@torch.no_grad()
def test_dataclasses_must_be_registered(tmp_path):
    with pytest.raises(ExportError, match="torch.export.register_dataclass"):
        built(Model(Unregistered), (X,))
    torch.export.register_dataclass(Registered, serialized_type_name="tests.Registered")
    model = Model(Registered).eval()
    built(model, (X,)).save(tmp_path / "one.stof")
    torch.testing.assert_close(stof_tvm.load(tmp_path / "one.stof")(X).total, model(X).total)


@pytest.mark.parametrize("path", [None, 3, b"x"])
def test_a_path_that_is_none(model, path):
    engine = built(model, X)
    for call in (stof_tvm.load, engine.save):
        with pytest.raises(InputError, match="a path must be a str or a Path, got"):
            call(path)


def test_a_folder_for_dumps_that_cannot_be_made(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOF_DUMP_DIR", str(tmp_path / "file" / "dump"))
    with pytest.raises(InputError, match="^STOF_DUMP_DIR=.*/dump is no folder that can be written: Not a directory$"):
        built(model, X)


def test_an_option_of_engines_that_there_is_not(model):
    engine = built(model, X)
    with pytest.raises(AttributeError, match="no option 'reuse_output'; there are reuse_outputs, inputs_in_place"):
        engine.reuse_output = True
    engine.reuse_outputs = True
    assert engine.reuse_outputs


class Attention(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT * 0.5, -1) @ x


@pytest.mark.parametrize("float32, passes", [("ieee", 3), ("tf32", 1)])
def test_float32_on_a_gpu_is_multiplied_as_asked_for(float32, passes, tmp_path):
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(16, 16))
    x = torch.randn(1, 64, 16)
    engine = stof_tvm.build(model, "cuda -arch=sm_80", (x,), masks.causal(), float32=float32)
    report = engine.report()
    assert report.rewritten[0].kernel == "block-wise" and "gemm" in [row.kernel for row in report.segments]
    assert report.float32 == float32 and ("float32: tf32" in str(report)) == (float32 == "tf32")
    multiplies = engine.cuda_source().count("tvm_builtin_ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(")
    sums = engine.cuda_source().count("tvm_builtin_ptx_sub_rn_f32(")
    assert multiplies > 2 and (sums > 0) == (passes == 3)
    engine.save(tmp_path / "engine")
    assert read_report(tmp_path / "engine")[1].float32 == float32


def test_float32_has_no_effect_on_a_cpu_and_in_half_precision():
    x = torch.randn(1, 16, 16)
    engine = stof_tvm.build(Attention(), "llvm", (x,), masks.causal(), float32="tf32")
    assert engine.report().float32 == "ieee" and engine.report().verification.result == "passed"
    source = stof_tvm.build(Attention(), "cuda -arch=sm_80", (x.half(),), masks.causal(), float32="tf32").cuda_source()
    assert "tf32" not in source.split("main_kernel")[0] and "m16n8k16" in source


@pytest.mark.parametrize("given", ["fast", "TF32", None, True])
@pytest.mark.parametrize("target", ["llvm", "cuda -arch=sm_80"])
def test_an_unknown_float32_is_named(given, target):
    with pytest.raises(InputError, match=f"float32={given!r} is not one of 'ieee', 'tf32'"):
        stof_tvm.build(Attention(), target, (torch.randn(1, 16, 16),), masks.causal(), float32=given)


class BoundedBias(torch.nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: 20 * torch.tanh((score + i - j) / 20))


def test_a_bias_that_flex_attention_bounds_is_told_as_what_it_is():
    with pytest.raises(NotRewrittenError, match="relax.tanh stands between q·kᵀ and the softmax"):
        stof_tvm.build(BoundedBias(), QUICK_LLVM, (torch.randn(1, 1, 16, 16),), masks.causal())
