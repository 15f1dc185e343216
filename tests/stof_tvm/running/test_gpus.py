"""Which GPU an engine is on, decided without any: tensors of GPUs that only pretend to be there."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import DeviceError, InputError, StofError
from stof_tvm.running.gpus import current_gpu, gpu_of, on_gpu
from tests.models.quick_llvm import QUICK_LLVM


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def on(where: str) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(2, 2, device=where)


class Holds(torch.nn.Module):
    def __init__(self, *tensors):
        super().__init__()
        for number, x in enumerate(tensors):
            self.register_buffer(f"x{number}", x)

    def forward(self, x):
        return x + self.x0


@pytest.mark.parametrize(
    "held, given, found",
    [
        (["cpu"], ["cpu"], None),
        ([], [], None),
        (["cuda:1"], ["cpu"], 1),
        (["cpu"], ["cuda:1", "cpu"], 1),
        (["cuda:0"], ["cuda:1"], 1),
        (["cuda:0", "cuda:1"], ["cpu"], None),
        (["cuda:0", "cuda:1"], ["cuda:0"], 0),
        (["cpu"], ["cuda:3"], None),
    ],
)
def test_the_gpu_of_an_example(two_gpus, held, given, found):
    inputs = [on(where) for where in given]
    assert gpu_of(Holds(*map(on, held)), ((), {"nested": {"x": inputs}})) == found


def test_example_inputs_on_two_gpus(two_gpus):
    with pytest.raises(InputError, match="on cuda:0 and cuda:1; an engine is on one GPU"):
        gpu_of(Holds(), ((on("cuda:1"), on("cuda:0")), None))


@pytest.mark.parametrize("held", ["_state_dict", "_constants"])
def test_the_gpu_of_an_exported_program(two_gpus, held):
    program = torch.export.export(Holds(torch.ones(2, 2)), (torch.ones(2, 2),))
    assert gpu_of(program, (None, None)) is None
    getattr(program, held)["x0"] = on("cuda:1")
    assert gpu_of(program, (None, None)) == 1
    program._example_inputs = (on("cuda:0"),), {}
    assert gpu_of(program, (None, None)) == 0, "its own example says where it computes"
    assert gpu_of(program, ((on("cuda:1"),), None)) == 1, "the one that is given says where the engine does"


def test_a_model_that_has_other_parameters():
    model = Holds(torch.ones(2, 2))
    model.buffers, model.parameters = [1, 2], {"a": 3}
    assert gpu_of(model, ((torch.ones(2, 2),), None)) is None


def test_example_inputs_on_two_gpus_for_a_cpu(two_gpus):
    """No engine is on a GPU then: what refuses them is the export of tensors without values."""
    with pytest.raises(StofError) as refused:
        stof_tvm.build(
            Holds(torch.ones(2, 2)), "llvm", (on("cuda:1"),), verify=False, example_kwargs={"y": on("cuda:0")}
        )
    assert "an engine is on one GPU" not in str(refused.value)


def test_without_gpus_nothing_changes():
    if torch.cuda.is_available():
        pytest.skip("says what happens without a GPU")
    assert current_gpu() == 0
    with on_gpu(3), on_gpu(None):
        pass


def test_a_process_that_has_not_used_a_gpu_stays_so(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    with on_gpu(0), on_gpu(1):
        assert entered == [1]


def test_an_engine_for_a_cpu_is_on_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    engine = stof_tvm.build(Holds(torch.ones(2, 2)), QUICK_LLVM, (torch.ones(2, 2),), verify=False)
    assert engine.device == torch.device("cpu") and engine._index == 0


def test_an_engine_is_on_the_gpu_that_is_current_when_it_is_built(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("says what happens without a GPU")

    class Attend(torch.nn.Module):
        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 64, 16, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        options = {"mask": masks.causal(), "replaceable_masks": True, "verify": False}
        engine = stof_tvm.build(Attend(), "cuda -arch=sm_80", (q,), **options)
    assert current_gpu() == 0
    for one in (engine, engine.with_mask(masks.sliding_window(3))):
        assert one.device == torch.device("cuda", 1)
        with pytest.raises(DeviceError, match="runs on cuda:1, and there is no CUDA GPU here"):
            one(q)
