"""A compiled program on a GPU: run once, captured in a CUDA graph, replayed at every later call."""

import copy
import itertools
from collections.abc import Callable, Collection, Sequence

import torch

from stof_tvm.running.alignment import aligned
from stof_tvm.running.shared_tensors import on_device
from stof_tvm.running.workspace import Workspace, block_bytes


class CudaProgram:
    """Owns all memory that the program writes: its blocks, copies of its inputs, and its outputs, which lie in blocks.

    Calls must follow one another on the GPU; they may come from any stream.

    Parameters
    ----------
    program
        Takes the inputs, then the blocks (uint8, one dimension), then the weights; returns a tensor or a sequence of
        tensors, all in the blocks.  It launches on PyTorch's current stream.
    block_sizes
        The blocks' sizes in bytes.
    in_place
        Numbers of inputs, such as a model's parameters, that the graph reads where they are instead of copies of them;
        where one of them has moved, the program is captured again.
    weights
        Constants on any device: copied to the program's device now and kept there as long as this object lives.
        Programs with the same tensor share its copy.
    workspace
        Where the blocks are; their own memory by default.
    """

    def __init__(
        self,
        program: Callable,
        block_sizes: Sequence[int],
        device: torch.device,
        in_place: Collection[int] = (),
        weights: Sequence[torch.Tensor] = (),
        workspace: Workspace | None = None,
    ):
        self._program = program
        self._device = device
        self._in_place = in_place
        memory = (workspace or Workspace()).memory(block_sizes, device)
        starts = itertools.accumulate(block_bytes(block_sizes), initial=0)
        self._blocks = [memory[start : start + size] for start, size in zip(starts, block_sizes, strict=False)]
        self._weights = [on_device(weight, device) for weight in weights]
        self._inputs: list[torch.Tensor] | None = None
        self._outputs: list[torch.Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls_before_capture = 1
        self.why_no_graph: str | None = None  # the reason, once capturing has failed

    def with_weights(self, weights: Sequence[torch.Tensor]) -> "CudaProgram":
        """The program with other weights, of the same dtypes and ranks, in the same memory.

        Calls of both must follow one another, and each overwrites the outputs of the other.  The first call is not
        captured, because such a program may have been made for a single call.
        """
        other = copy.copy(self)
        other._weights = [on_device(weight, self._device) for weight in weights]
        other._inputs, other._outputs, other._graph = None, [], None
        other._calls_before_capture, other.why_no_graph = 2, None
        return other

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, which the next call overwrites.

        While the caller captures a graph of its own, that graph gets the program's kernels, on these very inputs.
        """
        if self.why_no_graph or torch.cuda.is_current_stream_capturing():
            return self._run([aligned(x) for x in inputs])
        if self._inputs is None or self._has_moved(inputs):
            self._inputs = [x if self._stays(n, x) else torch.empty_like(x) for n, x in enumerate(inputs)]
            self._graph = None
        for n, (bound, x) in enumerate(zip(self._inputs, inputs, strict=True)):
            if not self._stays(n, x):
                bound.copy_(x)
        if self._graph is None:
            outputs = self._run(self._inputs)  # loads the kernels, which a capture cannot
            self._calls_before_capture -= 1
            if self._calls_before_capture <= 0:
                self._capture()
            return outputs
        self._graph.replay()
        return self._outputs

    def drop_graph(self) -> None:
        """Forget the graph, if there is one; the next call captures another."""
        if self._graph is not None:
            self._graph.reset()
        self._inputs, self._outputs, self._graph = None, [], None

    def _stays(self, number: int, x: torch.Tensor) -> bool:
        """Whether kernels read an input where it is."""
        return number in self._in_place and aligned(x) is x

    def _has_moved(self, inputs) -> bool:
        bound = self._inputs or inputs
        return any(self._stays(n, x) and bound[n].data_ptr() != x.data_ptr() for n, x in enumerate(inputs))

    def _capture(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads may do what a capture forbids, such as allocating.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._outputs = self._run(self._inputs)
                finally:
                    graph.capture_end()
            self._graph = graph
        except Exception as error:  # PyTorch's, TVM's or CUDA's, for an operator that needs the host
            cause = error.__context__ or error  # ending an interrupted capture raises, too
            self.why_no_graph = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
            self._inputs, self._outputs = None, []
            # Else PyTorch's random generator would wait for the end of the capture for ever.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())

    def _run(self, inputs) -> list[torch.Tensor]:
        outputs = self._program(*inputs, *self._blocks, *self._weights)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
