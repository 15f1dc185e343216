"""When a program is run, captured and replayed, as far as a machine without a GPU can tell."""

import contextlib

import pytest
import torch

from stof_tvm.running.cuda_program import CudaProgram

SIZES = (40, 24)  # bytes: what the program doubles into, and what lies beside it


class FakeGpu:
    """Kernels run at once, or are written into the graph that is being captured."""

    def __init__(self, monkeypatch):
        self.capturing, self.captured, self.launches, self.refuses = None, 0, 0, False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing is not None)
        self.stream, self.generator = FakeStream(), FakeGenerator()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def launch(self, kernel):
        self.launches += 1
        if self.capturing is None:
            kernel()
        elif self.refuses:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        else:
            self.capturing.kernels.append(kernel)

    def program(self, x, block, other):
        """Twice x, which lies in a block."""
        out = block.view(torch.float32)
        self.launch(lambda: (other.fill_(255), out.copy_(2 * x)))
        return out


class FakeStream:
    def __init__(self):
        self.waits_for = []

    def wait_stream(self, stream):
        self.waits_for.append(stream)


class FakeGenerator:
    """Random numbers that a capture has made wait for its end."""

    waits = True

    def clone_state(self):
        return "a state that waits for nothing"

    def graphsafe_set_state(self, state):
        self.waits = state != "a state that waits for nothing"


class FakeGraph:
    def __init__(self, gpu):
        self.gpu, self.kernels = gpu, []

    def capture_begin(self, capture_error_mode="global"):
        self.gpu.capturing, self.gpu.captured = self, self.gpu.captured + 1

    def capture_end(self):
        self.gpu.capturing = None
        if self.gpu.refuses:
            raise RuntimeError("the capture was interrupted")

    def reset(self):
        self.kernels = None

    def replay(self):
        for kernel in self.kernels:
            kernel()


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@pytest.fixture
def program(gpu):
    return CudaProgram(gpu.program, SIZES, torch.device("cpu"))


def test_the_first_call_runs_and_later_ones_replay(gpu, program):
    for number in range(3):
        x = torch.full((10,), float(number))
        (out,) = program([x])
        assert torch.equal(out, 2 * x)
    assert program.is_captured and gpu.captured == 1
    assert gpu.launches == 2, "once as it is and once into the graph"


def test_a_graph_that_is_dropped_is_captured_again(gpu, program):
    program.drop_graph()
    for number in range(4):
        if number == 2:
            program.drop_graph()
            assert not program.is_captured
        x = torch.full((10,), float(number))
        assert torch.equal(program([x])[0], 2 * x)
    assert program.is_captured and gpu.captured == 2


def test_blocks_are_aligned_and_apart(gpu):
    blocks = []
    program = CudaProgram(lambda x, *given: blocks.extend(given) or given[0], SIZES, torch.device("cpu"))
    program([torch.ones(1)])
    first, second = blocks[:2]
    assert [len(first), len(second)] == list(SIZES)
    assert second.data_ptr() - first.data_ptr() == 256


def test_outputs_are_the_same_tensors_at_every_call(program):
    program([torch.ones(10)])
    (out,) = program([torch.ones(10)])
    (again,) = program([torch.zeros(10)])
    assert again is out and not out.any()


def test_a_capture_of_the_callers_gets_the_kernels_on_its_own_inputs(gpu, program):
    x = torch.ones(10)
    program([x])
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    (out,) = program([x])
    graph.capture_end()
    x.fill_(5.0)
    assert not torch.equal(out, 2 * x)
    graph.replay()
    assert torch.equal(out, 2 * x)


def test_where_capturing_fails_calls_go_on_without(gpu, program):
    gpu.refuses, stream = True, gpu.stream
    for number in range(3):
        x = torch.full((10,), float(number))
        assert torch.equal(program([x])[0], 2 * x)
    assert not program.is_captured and gpu.captured == 1
    assert program.why_no_graph == "RuntimeError: operation not permitted when stream is capturing"
    assert gpu.stream is stream and not gpu.generator.waits


def test_parameters_are_read_where_they_are(gpu):
    weight, blocks = torch.ones(10), []

    def scaled(x, w, block, other):
        blocks.append(w.data_ptr())
        return gpu.program(x * w, block, other)

    program = CudaProgram(scaled, SIZES, torch.device("cpu"), in_place=(1,))
    for _ in range(2):
        program([torch.ones(10), weight])
    assert set(blocks) == {weight.data_ptr()} and gpu.captured == 1
    moved = torch.full((10,), 3.0)
    assert torch.equal(program([torch.ones(10), moved])[0], torch.full((10,), 6.0))
    assert blocks[-1] == moved.data_ptr() and gpu.captured == 2


def test_a_parameter_that_is_not_aligned_is_copied(gpu):
    weight = torch.ones(11)[1:]
    program = CudaProgram(lambda x, *blocks: gpu.program(x, *blocks), SIZES, torch.device("cpu"), in_place=(0,))
    for number in range(3):
        weight.fill_(number)
        assert torch.equal(program([weight])[0], 2 * weight)
    assert gpu.captured == 1


def test_weights_lie_on_the_device_for_as_long_as_the_program(gpu):
    weight, given = torch.full((10,), 3.0), []

    def scaled(x, block, other, w):
        given.append(w)
        return gpu.program(x * w, block, other)

    program = CudaProgram(scaled, SIZES, torch.device("cpu"), weights=[weight])
    for _ in range(3):
        assert torch.equal(program([torch.ones(10)])[0], torch.full((10,), 3.0 * 2))
    assert gpu.captured == 1 and len({id(w) for w in given}) == 1
    assert gpu.launches == 2, "once as it is and once into the graph"


def test_other_weights_in_the_same_memory(gpu):
    """Each has its own graph; one that is called once is not captured."""
    blocks = []

    def scaled(x, block, other, w):
        blocks.append(block.data_ptr())
        return gpu.program(x * w, block, other)

    first = CudaProgram(scaled, SIZES, torch.device("cpu"), weights=[torch.full((10,), 3.0)])
    x = torch.ones(10)
    assert torch.equal(first([x])[0], 6 * x) and gpu.captured == 1
    second = first.with_weights([torch.full((10,), 5.0)])
    assert torch.equal(second([x])[0], 10 * x) and gpu.captured == 1
    assert torch.equal(first([x])[0], 6 * x)
    assert torch.equal(second([x])[0], 10 * x) and gpu.captured == 2
    for _ in range(2):
        assert torch.equal(first([x])[0], 6 * x) and torch.equal(second([x])[0], 10 * x)
    assert gpu.captured == 2 and len(set(blocks)) == 1
