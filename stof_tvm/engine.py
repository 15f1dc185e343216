"""The compiled model: called like the PyTorch model, saved to one file, loaded without the PyTorch model."""

import contextlib
import dataclasses
import functools
import json
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import tvm
from tvm import relax

from stof_tvm.report import Report, Verification
from stof_tvm.rules import found
from stof_tvm.running.alignment import aligned
from stof_tvm.running.cuda_program import CudaProgram
from stof_tvm.running.gpus import current_device, on_gpu
from stof_tvm.running.has_data import check_has_data, check_makes_data
from stof_tvm.running.machine import why_not_here
from stof_tvm.running.states import States, Store, described
from stof_tvm.running.workspace import Workspace
from stof_tvm.saving.artifact import load_artifact, save_artifact
from stof_tvm.saving.weights_file import Weights
from stof_tvm.signature import Signature
from tir_kernels.compiling.cpu_threads import use_all_cores
from tir_kernels.errors import ArtifactError, CompileError, DeviceError, InputError, UnsupportedError

if TYPE_CHECKING:  # a loaded engine does without the compiler
    from relax_passes.parallel.placement import Mailboxes, Shard
    from stof_tvm.mask_arrays import MaskArrays
    from stof_tvm.parallel.ranks import Peers

NO_WEIGHTS = Weights()
SHARING = threading.Lock()  # one change of who shares states at a time
OPTIONS = ("reuse_outputs", "inputs_in_place")
IN_TRACED = (
    "an engine computes at once, with compiled kernels. What traces or transforms a function takes the model itself"
)


class Engine:
    """A compiled model.  `build` and `load` return one.

    Calls take and return torch tensors.  On a GPU they run on the caller's current stream; the first call launches the
    kernels, later calls replay a CUDA graph.  Threads and streams may share an engine; its calls run one after another,
    because they share its memory.

    Attributes
    ----------
    reuse_outputs : bool
        False: every call returns new tensors.  True, on a GPU: the outputs stay where the graph wrote them, which saves
        a copy; they are valid only until the engine's next call from any thread or stream.
    inputs_in_place : collection of int
        Indices of inputs that are the same tensors at nearly every call (parameters).  A CUDA graph reads them in place
        instead of copies.  Set it before the first call.
    """

    def __init__(
        self,
        library,
        export_library,
        signature: Signature,
        report: Report,
        mask_digests: list[str],
        memory: list[int],
        weights: Weights = NO_WEIGHTS,
        kernels: Callable[[], bytes] = bytes,
        initial: Sequence[torch.Tensor] = (),
        masks: "MaskArrays | None" = None,
        arrays: Sequence[torch.Tensor] = (),
    ):
        self._library = library  # an Executable from the compiler, or a Module from a file
        self._export_library = export_library
        self._signature = signature
        self._report = report
        self._mask_digests = mask_digests
        self._memory = memory  # bytes of each memory block passed to a program for a GPU
        self._kernels = kernels  # gives the machine code that is saved beside the library
        self._weights = weights  # passed to a program after its inputs and memory
        self._initial = initial  # values of the buffers that calls update
        self._masks = masks  # makes mask arrays, if masks may be replaced
        self._arrays = arrays  # mask arrays, passed after the weights
        self._device_type = json.loads(report.target)["kind"].replace("llvm", "cpu")
        self._n_found = found.results_of_rules(report.rewritten)
        self._found: list[torch.Tensor] = []  # what the program returned of its rules' block maps in the last call
        self._first: Engine | None = None  # the engine that this one is, with other masks
        self._program: Callable | None = None
        self._store = Store()
        self._store.members.add(self)
        self._workspace: Workspace | None = None
        self._peers: Peers | None = None
        self._shards: Mapping[str, Shard] = {}
        self._memory_with_peer: Mailboxes | None = None
        self._index = current_device(self._device_type).index or 0
        self.reuse_outputs = False
        self.inputs_in_place: Collection[int] = ()

    def __setattr__(self, name, value):
        # A misspelled option would be set without effect.
        if not name.startswith("_") and name not in OPTIONS and not hasattr(type(self), name):
            raise AttributeError(f"an Engine has no option {name!r}; there are {', '.join(OPTIONS)}")
        super().__setattr__(name, value)

    def __call__(self, *args, **kwargs):
        """Run the model on inputs of the shapes and dtypes that it was built for.

        `args` and `kwargs` are those of the PyTorch model: tensors on the engine's device, nested as in the example.
        Returns what the model returned (tuples, dicts, transformers' output objects).  Calls on different streams run
        one after another.  A call may be captured in a CUDA graph of the caller's, after one ordinary call; the graph
        must not be replayed while another call runs.

        Raises InputError for inputs that do not fit, DeviceError without the device.
        """
        with self._in_step():
            return self.run(self._signature.arguments(args, kwargs))

    def run(self, values: list):
        """A call whose inputs are already in a list.  Returns and raises what a call does.

        Parameters
        ----------
        values : list
            What `signature.arguments` returns: a tensor for each input, of its shape and dtype; else InputError.
        """
        with self._in_step():
            tensors = self._signature.checked(values)
            self._check_device(tensors)
            with self._turn() as store:
                self._states.check(values, store)
                outputs = self._run(tensors, store)
            return self._signature.unflatten(outputs)

    def _in_step(self) -> "contextlib.AbstractContextManager[None]":
        """The context of a call, which other ranks may make as well."""
        return contextlib.nullcontext() if self._peers is None else self._peers.in_step()

    def __repr__(self) -> str:
        inputs = ", ".join(f"{x.name}: {x.dtype}{list(x.shape)}" for x in self._signature.inputs)
        sites, rewritten = self._report.sites, self._report.rewritten
        return f"Engine({inputs}; on {self.device}, {len(rewritten)} of {len(sites)} attentions on kernels)"

    def __reduce__(self):
        # `copy` and `multiprocessing` call this, too.
        raise TypeError("an Engine cannot be pickled or copied: engine.save(path), and stof_tvm.load(path) elsewhere")

    @property
    def device(self) -> torch.device:
        """Where inputs must be and outputs are."""
        return torch.device(self._device_type, self._index) if self._device_type == "cuda" else torch.device("cpu")

    def set_verification(self, verification: Verification) -> None:
        """Set the verification in the report.  Raises nothing.

        Parameters
        ----------
        verification : Verification
            The outcome of comparing this engine with PyTorch.
        """
        self._report = dataclasses.replace(self._report, verification=verification)

    def belongs_to(self, peers: "Peers", shards: "Mapping[str, Shard]", memory: "Mailboxes | None" = None) -> None:
        """Be the engine of one rank: all ranks call it together.  Raises nothing.

        Parameters
        ----------
        peers : Peers
            The ranks that the model is divided among.
        shards : dict of str to Shard
            How the states of the model's own are divided, by name; those that are whole are not in it.
        memory : Mailboxes, optional
            What the program shares with another rank, which is kept as long as the engine.
        """
        self._peers, self._shards, self._memory_with_peer = peers, shards, memory

    @property
    def device_type(self) -> str:
        """Where inputs must be, "cuda" or "cpu"."""
        return self._device_type

    @property
    def signature(self) -> Signature:
        """Names, shapes and dtypes of inputs and outputs, and how calls nest them."""
        return self._signature

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of a call's arguments, in the model's order."""
        return tuple(self.signature.names)

    @functools.cached_property
    def _main(self) -> Callable:
        """The program in TVM's virtual machine."""
        return relax.VirtualMachine(self._library, tvm.device(self._device_type, self._index))["main"]

    @functools.cached_property
    def _states(self) -> States:
        return States(self._signature, self._initial, self.device)

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The model's buffers that calls update, by their names: the tensors themselves, as the next call reads them.

        Write into them to set them (`engine.state["cache.keys"].zero_()`), while no call runs.  DeviceError without
        the device.
        """
        self.prepare()
        with self._store.lock:
            return types.MappingProxyType(self._states.allocated(self._store))

    def whole_state(self, name: str) -> torch.Tensor:
        """A copy of a state; of one that is divided among ranks the whole, for which all ranks must ask.

        Parameters
        ----------
        name : str
            A key of `state`.

        Raises
        ------
        DeviceError
            There is no such device.
        RuntimeError
            torch.distributed's, where a rank is gone.
        """
        value = self.state[name]
        if self._peers is None or name not in self._shards:
            return value.clone()
        from stof_tvm.parallel.states import whole_state

        return whole_state(value, self._shards[name], self._peers)

    def reset_state(self) -> None:
        """Give `state` the values that the model's buffers had when the engine was built."""
        self.prepare()
        with self._turn() as store:
            store.reset()

    def add_to_state(self, name: str, number: float) -> None:
        """Add a number to one of `state`, in turn with calls, those on other streams among them.

        Parameters
        ----------
        name : str
            A key of `state`; else KeyError.
        number : int or float

        Raises
        ------
        DeviceError
            There is no such device.
        """
        self.prepare()
        with self._turn() as store:
            self._states.allocated(store)[name].add_(number)

    def share_state(self, other: "Engine") -> None:
        """From now on update the buffers of `other`, such as the engine of a prompt for that of single tokens.

        Engines that share this engine's buffers follow it.  Calls of all of them run one after another.  Raises
        InputError unless both have buffers of the same names, shapes and dtypes on the same device.
        """
        if type(other) is not Engine:
            raise InputError(f"share_state takes an Engine, got a {type(other).__name__}")
        if self.device != other.device:
            raise InputError(f"engines that share states are on one device, these are on {self.device}, {other.device}")
        own, others = self._states.kinds, other._states.kinds
        if not own or own != others:
            apart = sorted({name for name, _ in own.items() ^ others.items()}) or ["none at all"]
            raise InputError(f"the engines do not have the same states; they differ in {', '.join(apart)}")
        with SHARING, self._store.lock:
            for member in list(self._store.members):
                member._join(other._store)

    def _join(self, store: Store) -> None:
        """Update the buffers of a store from now on."""
        store.members.add(self)
        self._store = store

    def _share_workspace(self, workspace: Workspace) -> None:
        """Compute in memory that others compute in, too: those that share this engine's store."""
        workspace.reserve(self._memory)
        self._workspace = workspace
        if self._device_type == "cuda":
            self._program = None  # it may have memory of its own from a verification

    def _on_its_gpu(self) -> contextlib.AbstractContextManager:
        """The context of launches, whichever GPU is the caller's current one."""
        return on_gpu(self._index if self._device_type == "cuda" else None)

    @contextlib.contextmanager
    def _turn(self):
        """The store of this engine's states, while no other engine that shares them runs."""
        while True:
            store = self._store
            with store.lock:
                if store is not self._store:  # joined another one meanwhile
                    continue
                with torch.no_grad(), self._on_its_gpu(), self._after_the_last_call(store):
                    yield store
                return

    def with_mask(self, mask) -> "Engine":
        """This engine with another mask, as `build` would make it with `mask`, but nothing is compiled.

        Only for an engine that was built with `replaceable_masks=True`.  Kernels and their blocks are those that were
        chosen for the first mask, which may not be the fastest for this one.  The new engine has the same weights and
        updates the same states; calls of both run one after another.  On a GPU they also share the memory of their
        results: with `reuse_outputs`, outputs hold until the next call of either.  Its second call captures a CUDA
        graph of its own.

        Parameters
        ----------
        mask : Mask, bool tensor or array, BlockMask, mask_mod function, dict of module path to these, or None
            As in `build`.  It takes the place of the mask that was given before; what the model masks by itself also
            holds.  A tensor is read now.

        Raises
        ------
        InputError
            An engine whose masks cannot be replaced.
        MaskError
            As `build` does.
        """
        if self._masks is None:
            raise InputError(
                "this engine's masks are fixed: build it with replaceable_masks=True, and with_mask gives it others"
            )
        from stof_tvm.mask_arrays import REPLACED, with_masks
        from stof_tvm.site_masks import SiteMasks

        site_masks = SiteMasks(mask)
        site_masks.check_reached(self._report.sites)
        arrays, masks = self._masks.of(site_masks)
        sites = with_masks(self._report.sites, masks)
        compared = Verification("skipped", f"{REPLACED}: results were compared with the first mask only")
        engine = Engine(
            self._library,
            self._export_library,
            self._signature,
            dataclasses.replace(self._report, sites=tuple(sites), verification=compared),
            sorted({stored.digest for _, stored in masks}),
            self._memory,
            Weights(self._weights.tensors),  # a file that was read once has other mask arrays
            self._kernels,
            self._initial,
            self._masks,
            arrays,
        )
        engine._first, engine._index = self._first or self, self._index
        engine.reuse_outputs, engine.inputs_in_place = self.reuse_outputs, self.inputs_in_place
        with SHARING:
            engine._join(self._store)
        return engine

    @property
    def mask_arrays(self) -> "MaskArrays | None":
        """What makes the arrays that attention kernels read of their masks; None if masks cannot be replaced."""
        return self._masks

    def read_arrays(self, arrays: Sequence[torch.Tensor]) -> None:
        """From now on read what the caller writes into these arrays; before the first call.  Raises nothing.

        Parameters
        ----------
        arrays : sequence of torch.Tensor
            On the engine's device, of the dtypes and ranks of those that `mask_arrays` makes, in the program's order.
        """
        self._arrays, self._program = arrays, None

    def report(self) -> Report:
        """The report: the kernel of each attention and each segment, with the reason, and how calls run on a GPU."""
        last = found.described(self.found_blocks())
        return dataclasses.replace(
            self._report, execution=self._execution(), states=described(self._signature), found=last
        )

    def found_blocks(self) -> "dict[str, found.FoundBlocks]":
        """What the rules of `masks.runtime` kept in the last call, by the path of the attention.

        Returns
        -------
        dict of str to FoundBlocks
            `density`, and `block_map`, a copy.  Empty without a rule, and before the first call, to which that of a
            verification does not count.

        Raises
        ------
        RuntimeError
            PyTorch's, where the GPU failed in the last call.
        """
        if not self._n_found:
            return {}
        with self._turn():
            return found.found_blocks(self._report.rewritten, self._found) if self._found else {}

    def _forget_found_blocks(self) -> None:
        """What the last call kept is not told any more: the call was not the user's.  Raises nothing."""
        with self._turn():
            self._found = []

    def cuda_source(self) -> str:
        """The CUDA C++ of all kernels, TVM's own included; CompileError for an engine without any.

        Needs no GPU: code that was built for another machine's GPU can be read here.
        """
        if self._device_type != "cuda":
            raise CompileError('an engine for the CPU has no CUDA source: build it for a GPU, "cuda -arch=sm_80"')
        # Imported only here, because importing it changes how TVM compiles CUDA.
        from tir_kernels.cuda.compile import cuda_source

        return cuda_source(self._library)

    def save(self, path) -> None:
        """Write the engine to one file, `path`; `stof_tvm.load` reads it back.

        An engine for a GPU that was built without a driver is compiled by nvcc now; without nvcc, by `load`.  Raises
        ArtifactError where the file cannot be written, CompileError where nvcc refuses the kernels, UnsupportedError
        for an engine that is divided among ranks.
        """
        if self._peers is not None:
            raise UnsupportedError(
                f"this engine is one of {self._peers.count} ranks, whose group no file can hold: build it on every rank"
            )
        self._write(path, self._weights)

    def _write(self, path, weights: Weights) -> None:
        """Write the engine's file with `weights` in it, all of the engine's or none."""
        save_artifact(
            path,
            target=self._report.target,
            device=self._device_type,
            masks=self._mask_digests,
            memory=self._memory,
            weights=Weights([*weights.tensors, *self._arrays, *(x.contiguous() for x in self._initial)], weights.crc32),
            signature=self._signature.to_json(),
            report=self._report.to_dict(),
            export_library=self._export_library,
            kernels=self._kernels(),
            mask_kernels=() if self._masks is None else self._masks.to_json(),
        )

    @contextlib.contextmanager
    def _after_the_last_call(self, store: Store):
        """On a GPU, let the current stream wait for the last call on another stream."""
        if self._device_type != "cuda" or not torch.cuda.is_available():
            yield
            return
        if torch.cuda.is_current_stream_capturing():
            # A graph cannot wait for work outside of it, nor can that work wait for it: whoever replays it orders them.
            yield
            return
        stream = torch.cuda.current_stream()
        if store.last_call is not None:
            stream.wait_event(store.last_call)
        yield
        store.last_call = stream.record_event()

    def prepare(self) -> Callable:
        """Load the program now instead of at the first call; DeviceError without the device."""
        if self._program is None:
            with self._on_its_gpu():
                self._program = self._load_program()
            if self._peers is not None:
                self._peers.end_with(self._program)
        return self._program

    def _run(self, tensors, store: Store) -> list[torch.Tensor]:
        program, states = self.prepare(), self._states
        taken = states.taken(tensors, store)
        if self._device_type == "cpu":
            outputs = program(*(aligned(tensor) for tensor in taken))
            results = [self._owned(x) for x in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)]
            results = self._own_results(results)
            return states.finish(tensors, taken, results, len(self._signature.outputs))
        results = self._own_results(program(taken))
        outputs = states.finish(tensors, taken, results, len(self._signature.outputs))
        if self.reuse_outputs:
            return outputs
        return [x if any(x is tensor for tensor in tensors) else x.clone() for x in outputs]

    def _own_results(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """A program's results without the last ones, which are what its rules found."""
        if self._n_found:
            results, self._found = results[: -self._n_found], results[-self._n_found :]
        return results

    def _load_program(self) -> Callable:
        if self._device_type == "cpu":
            if (why := why_not_here(self._report.target)) is not None:  # else it would crash the process
                raise DeviceError(f"this engine was built for {self._report.target}, and {why}")
            use_all_cores()
        if not tvm.device(self._device_type, self._index).exist:
            raise DeviceError(f"this engine was built for {self._report.target}, and there is no such device here")
        tensors = [*self._weights.tensors, *self._arrays]
        if self._device_type == "cpu":
            program = self._main if self._first is None else self._first._main
            weights = [tvm.runtime.from_dlpack(aligned(x)) for x in tensors]  # once, not at every call
            return lambda *inputs: program(*inputs, *weights)
        if self._first is not None:
            loaded = self._first.prepare()
            assert isinstance(loaded, CudaProgram)
            return loaded.with_weights(tensors)
        in_place = {*self.inputs_in_place, *self._states.parameters}
        return CudaProgram(self._main, self._memory, self.device, in_place, tensors, self._workspace)

    def _owned(self, output: torch.Tensor) -> torch.Tensor:
        """An output that the caller may write to: a model may return one of its weights."""
        is_weight = any(output.data_ptr() == weight.data_ptr() for weight in self._weights.tensors)
        return output.clone() if is_weight else output

    def _execution(self) -> str:
        if self._device_type == "cpu":
            return ""
        program = self._program if isinstance(self._program, CudaProgram) else None
        if program is not None and program.why_no_graph:
            return f"without a CUDA graph, because capturing failed: {program.why_no_graph}"
        captured = program is not None and program.is_captured
        return "replays of a CUDA graph" if captured else "the first one captures a CUDA graph for the later ones"

    def _check_device(self, tensors) -> None:
        for spec, tensor in zip(self._signature.inputs, tensors, strict=True):
            if tensor.device.type != self._device_type or tensor.device.index not in (None, self._index):
                where = f"{self._device_type}:{self._index}"
                if self._device_type == "cuda" and not torch.cuda.is_available():
                    raise DeviceError(f"the engine runs on {where}, and there is no CUDA GPU here")
                raise InputError(f"{spec.name} is on {tensor.device}; the engine runs on {where}")
            check_has_data(spec.name, tensor, IN_TRACED)
        check_makes_data(IN_TRACED)


def load_engine(path) -> Engine:
    """Load the engine of one shape that was saved as `path`.

    Raises ArtifactError for a file that is truncated, altered, of another version, or made for another machine.  An
    artifact contains machine code: load only files that you trust as you would trust a program.
    """
    artifact = load_artifact(path)
    kinds = [(x.shape, x.dtype) for x in artifact.signature.states if x.input is None]
    first = len(artifact.weights.tensors) - len(kinds)
    stored = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in artifact.weights.tensors[max(first, 0) :]]
    if stored != kinds:
        raise ArtifactError(f"{path} is not a whole saved engine: its states are {kinds}, and it holds {stored}")
    masks, tensors = None, artifact.weights.tensors
    last = first
    if described := artifact.manifest["mask_kernels"]:
        from stof_tvm.mask_arrays import MaskArrays

        masks = MaskArrays.from_json(described, json.loads(artifact.report.target))
        first -= masks.count
        if first < 0:
            raise ArtifactError(f"{path} is not a whole saved engine: it lacks the mask arrays of its kernels")
    return Engine(
        artifact.library,
        artifact.export_library,
        artifact.signature,
        artifact.report,
        artifact.manifest["masks"],
        artifact.manifest["memory"],
        Weights(tensors[:first], artifact.weights.crc32),
        lambda: artifact.kernels,
        tensors[last:],
        masks,
        tensors[first:last],
    )
