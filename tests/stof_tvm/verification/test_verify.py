"""`build(verify=True)`: wrong engines are refused, right ones pass, and what is not compared is said."""

import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import VerificationError
from stof_tvm.verification import verify
from tests.models.quick_llvm import QUICK_LLVM

WIDTH, HEADS, LENGTH = 16, 2, 24


@tvm.transform.module_pass(opt_level=0, name="TanhToSigmoid")
class TanhToSigmoid:
    """A rule that is wrong."""

    def transform_module(self, mod, _ctx):
        @mutator
        class Wrong(PyExprMutator):
            def visit_call_(self, call):
                call = super().visit_call_(call)
                is_tanh = isinstance(call.op, tvm.ir.Op) and call.op.name == "relax.tanh"
                return relax.op.sigmoid(call.args[0]) if is_tanh else call

        wrong = Wrong(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                wrong.builder_.update_func(name, wrong.visit_expr(function))
        return wrong.builder_.get()


class Layer(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.activation(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        functions = torch.nn.ReLU(), torch.nn.Tanh()
        self.layers = torch.nn.Sequential(*(Layer(function) for function in functions))

    def forward(self, x):
        return {"hidden": self.layers(x), "length": x.shape[1]}


@pytest.fixture(scope="module")
def x():
    return torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def build(model, x, **options):
    return stof_tvm.build(model, QUICK_LLVM, x if isinstance(x, tuple) else (x,), tuning_logs=False, **options)


@pytest.mark.parametrize("mask", [None, masks.sliding_window(2)], ids=["unmasked", "masked"])
def test_a_wrong_engine_is_refused_and_its_first_wrong_module_named(x, mask):
    with pytest.raises(VerificationError, match="output 0: largest difference .* first .* is layers.1.activation") as e:
        build(Model().eval(), x, mask=mask, rules=[TanhToSigmoid()])
    assert "PyTorch's own" in str(e.value) and "verify=False" in str(e.value)


def test_verifying_can_be_left_out():
    engine = build(torch.nn.Tanh(), torch.ones(4, 8), rules=[TanhToSigmoid()], verify=False)
    assert engine.report().verification.result == "skipped"


def test_a_right_engine_says_what_was_found(x):
    model = Model()
    assert model.training
    report = build(model, x, mask={"layers.1": masks.causal()}).report()
    assert model.training  # its mode is as it was
    assert report.verification.result == "passed" and 0 <= report.verification.error < 1e-5
    assert report.verification.seconds > 0 and "compared with PyTorch: passed" in str(report)
    assert type(report).from_dict(report.to_dict()).verification == report.verification


def test_an_attention_that_lost_its_mask_is_found(x, monkeypatch):
    monkeypatch.setattr(stof_tvm.site_masks.SiteMasks, "__call__", lambda self, site: None)
    with pytest.raises(VerificationError, match="first module whose output differs is layers.0"):
        build(Model().eval(), x, mask=masks.sliding_window(2))


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_an_ill_conditioned_model_passes():
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 8)
    report = build(Function(lambda x: torch.sin(linear(x) * 1e5)).eval(), torch.randn(4, 256)).report()
    assert report.verification.result == "passed" and report.verification.error > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_by_the_error_rule(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1), torch.nn.LayerNorm(64)).to(dtype)
    report = build(model.eval(), torch.randn(4, 64).to(dtype)).report()
    assert report.verification.result == "passed"


def test_nan_where_pytorch_has_nan():
    report = build(Function(lambda x: torch.log(x)).eval(), torch.tensor([1.0, -1.0, 0.0, 2.0])).report()
    assert report.verification.result == "passed"


def test_an_exported_program():
    program = torch.export.export(torch.nn.Tanh(), (torch.ones(4, 8),), strict=False)
    assert build(program, torch.zeros(4, 8)).report().verification.result == "passed"
    on_its_own = stof_tvm.build(program, QUICK_LLVM, tuning_logs=False)
    assert on_its_own.report().verification.result == "passed"
    program.example_inputs = None
    without = stof_tvm.build(program, QUICK_LLVM, tuning_logs=False)
    assert without.report().verification.detail == "there are no example inputs to call it with"


def test_what_fails_in_pytorch_is_not_compared():
    table = torch.nn.Embedding(4, 8)
    found = build(table.eval(), torch.tensor([[1, 7]])).report().verification
    assert found.result == "not verified" and "IndexError" in found.detail


def test_another_machines_engine_is_not_compared(monkeypatch):
    monkeypatch.setattr(verify, "why_not_here", lambda target: "this CPU lacks avx10.2-512")
    found = build(torch.nn.Tanh(), torch.ones(4, 8)).report()
    assert found.verification.detail == "no such device: this CPU lacks avx10.2-512"
    assert "compared with PyTorch: not verified" in str(found)


def test_a_cuda_engine_where_there_is_no_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    engine = stof_tvm.build(torch.nn.ReLU(), "cuda -arch=sm_80", (torch.ones(4, 8),), tuning_logs=False)
    assert engine.report().verification.detail == "no such device: there is no CUDA GPU here"


def test_a_model_that_exports_something_else_is_refused():
    class Decides(torch.nn.Module):
        def forward(self, x):
            return x * 200 if torch.compiler.is_compiling() else x * 2

    with pytest.raises(VerificationError, match="from what torch.export made of it"):
        stof_tvm.build(Decides(), QUICK_LLVM, (torch.randn(2, 8),), tuning_logs=False)


TABLES = {}


def table(size):
    if size not in TABLES:
        TABLES[size] = torch.arange(size).float().sin()
    return TABLES[size]


class KeepsTables(torch.nn.Module):
    """What it computed once is in a global."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        return x + table(x.shape[-1])


def test_a_models_own_cache_is_left_usable():
    """torch.export would leave tensors without values in it, and PyTorch's own calls after the build would fail."""
    model, x = KeepsTables(), torch.randn(2, 8)
    TABLES.clear()
    for _ in range(2):
        engine = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False)
        torch.testing.assert_close(engine(x), x + torch.arange(8).float().sin())
        torch.testing.assert_close(model(x), engine(x))


def test_buffers_that_a_model_updates_stay_as_they_were():
    class Counts(KeepsTables):
        def forward(self, x):
            self.calls += 1
            return x + self.calls

    model = Counts()
    engine = stof_tvm.build(model, QUICK_LLVM, (torch.ones(2),), tuning_logs=False)
    assert engine.report().verification.result == "passed"
    assert model.calls == 0 and engine.state["calls"] == 0
