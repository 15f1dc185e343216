"""What a row's engine reads of its sequences, written on the GPU for each batch's lengths, without waiting for it.

The vectors of a packed program and the lists of its attention kernels always lie in the same memory, so the engine's
CUDA graph replays with any lengths.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from stof_tvm.frontend.packing.rewriter import ENDS, FIRST, NUMBER, PLACE, STARTS
from stof_tvm.mask_arrays import MaskArrays
from stof_tvm.masks import Mask
from stof_tvm.masks.windows import is_by_distance, kept_distances
from stof_tvm.packed.layout import Layout
from tir_kernels.attention.compiled import compile_step
from tir_kernels.attention.documents.plan import document_plan
from tir_kernels.attention.documents.tokens import tokens
from tir_kernels.attention.template import Plan
from tir_kernels.cuda.device import gpu_of
from tir_kernels.errors import InputError, UnsupportedError

MOST_BYTES = (
    64 << 20
)  # of the keep bits of an attention's blocks: longer rows of longer sequences are planned on the CPU


class DeviceLists:
    """The lists of a row's engine.  Threads may share it; those of one batch are in use during a `turn`.

    Parameters
    ----------
    masks : MaskArrays
        Of the engine.
    plans : sequence of Plan
        What `plans_of` gives.
    row, sequences : int
        The length of the row, and how many sequences its program takes.
    device : torch.device
        A GPU.

    Attributes
    ----------
    count : int
        How many different lists there are: kernels that are alike read the same.
    """

    def __init__(
        self,
        masks: MaskArrays,
        plans: Sequence[Plan],
        row: int,
        sequences: int,
        device: torch.device,
    ):
        self._device = device
        self._tokens = compile_step(tokens(), masks.target)
        counts = {PLACE: row, NUMBER: row, FIRST: row, STARTS: max(1, sequences), ENDS: max(1, sequences)}
        self.vectors = {name: torch.zeros(n, dtype=torch.int64, device=device) for name, n in counts.items()}
        self.taken = torch.zeros(row, dtype=torch.int64, device=device)
        self._bounds = torch.zeros(row, 2, dtype=torch.int32, device=device)
        self._launches: list[tuple] = []
        different = {id(plan): plan for plan in plans}
        self.count = len(different)
        written = {key: self._prepared(plan, masks.target) for key, plan in different.items()}
        self.arrays = [array for plan in plans for array in written[id(plan)]]  # in the program's order
        self._lock = threading.Lock()
        self._layout: Layout | None = None  # whose lists they are
        self._documents = torch.zeros(0)  # where its sequences are, in memory of the CPU that is copied from
        self._last: torch.cuda.Event | None = None  # the end of the last turn
        self._captured: list[torch.Tensor] = []  # what graphs of a caller's own copy from

    def _prepared(self, plan: Plan, target) -> list[torch.Tensor]:
        """The arrays that an attention kernel reads; its plan's steps are launched in each turn of another layout."""
        known = {name: torch.tensor(array, device=self._device) for name, array in plan.constants.items()}
        known["bounds"] = self._bounds
        for step in plan.steps.values():
            for name, (shape, dtype) in step.outputs.items():
                known[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
            function = compile_step(step.function, target)
            self._launches.append((function, [known[name] for name in (*step.inputs, *step.outputs)]))
        workspace = [torch.from_numpy(array).to(self._device) for array in plan.rest.arrays]
        return [*(known[name] for name in plan.operands), *workspace]

    @contextlib.contextmanager
    def turn(self, layout: Layout) -> Iterator[None]:
        """The lists are those of a layout's sequences; other threads, and other streams on the GPU, wait.

        Raises InputError where a caller captures a graph of its own before a call with these lengths.
        """
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                if layout != self._layout:
                    raise InputError("a call with these lengths must come before one that is captured in a CUDA graph")
                # When the graph is replayed the lists may be another batch's, and then they are this one's.
                self._captured.append(self._documents)
                self.write()
                yield
                return
            if self._last is not None:
                stream.wait_event(self._last)
            try:
                if layout != self._layout or self._captured:
                    self._layout = None
                    # PyTorch gives this memory to nobody else before the copy from it is done.
                    self._documents = torch.from_numpy(layout.documents()).pin_memory()
                    self.write()
                    self._layout = layout
                yield
            finally:
                self._last = stream.record_event()

    def write(self) -> None:
        """Launch what writes the vectors and the lists of the last turn's layout.  Raises nothing."""
        documents = self._documents.to(self._device, non_blocking=True)
        vectors = (self.vectors[name] for name in (FIRST, PLACE, NUMBER))
        self._tokens(documents, self._bounds, *vectors, self.taken, self.vectors[STARTS], self.vectors[ENDS])
        for function, tensors in self._launches:
            function(*tensors)


def plans_of(masks: MaskArrays, inside: Mapping[str, Mask | None], row: int, longest: int) -> list[Plan] | None:
    """The plan that writes the lists of each of an engine's kernels on the GPU; None where one cannot be written so.

    Kernels whose lists are the same have the same plan.

    Parameters
    ----------
    masks : MaskArrays
        Of an engine that was built for lists that are written on the GPU.
    inside : dict of str to Mask or None
        The mask inside of each sequence, by the path of the attention.
    row, longest : int
        The length of the row, and of the longest sequence.
    """
    found: list[Plan] = []
    known: dict[tuple, Plan] = {}
    for kernel in masks.kernels:
        problem, site = kernel.problem, kernel.site
        among_tokens = problem.batch == 1 and problem.q_len == problem.kv_len == row
        if site.path not in inside or not among_tokens or site.causal or site.constant is not None:
            return None
        mask = inside[site.path]
        reader = kernel.template.reader(problem, kernel.config, masks.target) if problem.block_map is not None else None
        if reader is None or not (mask is None or is_by_distance(mask)):
            return None
        key = kernel.template.NAME, problem, kernel.config, mask
        if key not in known:
            block = kernel.config.block_m, kernel.config.block_n
            keeps = None if mask is None else kept_distances(mask, longest)
            try:
                known[key] = document_plan(problem, block, longest, keeps, gpu_of(masks.target), reader)
            except UnsupportedError:
                return None
            shape, _ = known[key].steps["keep_words"].outputs["keep_bits"]
            if np.prod(shape, dtype=np.int64) * 4 > MOST_BYTES:
                return None
        found.append(known[key])
    return found
