"""The compiled model: called like the PyTorch model, saved to one file, loaded without it."""

import contextlib
import json
import threading

import torch
import tvm
from tvm import relax

from stof_tvm.alignment import aligned
from stof_tvm.artifact import load_artifact, save_artifact
from stof_tvm.frontend.signature import Signature
from stof_tvm.report import Report
from tir_kernels.attention.cpu_threads import use_all_cores
from tir_kernels.errors import DeviceError, InputError


class Engine:
    """A compiled model.  `build` and `load` make it.

    Calls take and return torch tensors without copies; on a GPU they run on the caller's current stream.  Threads and
    streams may share an engine: its calls run one after another, since they share its memory.
    """

    def __init__(self, library, export_library, signature: Signature, report: Report, mask_digests: list[str]):
        self._library = library  # an Executable from the compiler, or a Module from a file
        self._export_library = export_library
        self._signature = signature
        self._report = report
        self._mask_digests = mask_digests
        self._device_type = json.loads(report.target)["kind"].replace("llvm", "cpu")
        self._machine = None
        self._last_call = None  # a CUDA event
        self._lock = threading.Lock()

    def __call__(self, *args, **kwargs):
        """Run the model on inputs of the shapes and dtypes that it was built for.

        Takes arguments positionally and by keyword like the PyTorch model, returns what it returned (tuples, dicts,
        transformers' output objects).  Calls on different streams follow one another; a call captured in a CUDA graph
        (after one ordinary call) must not be replayed beside other calls.

        Raises InputError for what does not fit, DeviceError without the device.
        """
        tensors = self._signature.flatten(args, kwargs)
        self._check_device(tensors)
        with self._lock, torch.no_grad(), self._after_the_last_call():
            outputs = self._run(*(aligned(tensor) for tensor in tensors))
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return self._signature.unflatten(outputs)

    def report(self) -> Report:
        """What became of each attention of the model."""
        return self._report

    def save(self, path) -> None:
        """Write the engine to one file; `stof_tvm.load` reads it back.  ArtifactError where that fails."""
        save_artifact(
            path,
            target=self._report.target,
            device=self._device_type,
            masks=self._mask_digests,
            signature=self._signature.to_json(),
            report=self._report.to_dict(),
            export_library=self._export_library,
        )

    @contextlib.contextmanager
    def _after_the_last_call(self):
        """On a GPU, let the current stream wait for what the engine's last call started on another."""
        if self._device_type != "cuda" or not torch.cuda.is_available():
            yield
            return
        if torch.cuda.is_current_stream_capturing():
            # A graph can neither wait for work outside of it nor be waited for: who replays it orders it.
            yield
            return
        stream = torch.cuda.current_stream()
        if self._last_call is not None:
            stream.wait_event(self._last_call)
        yield
        self._last_call = stream.record_event()

    def _run(self, *tensors):
        if self._machine is None:
            if self._device_type == "cpu":
                use_all_cores()
            device = tvm.device(self._device_type, 0)
            if not device.exist:
                raise DeviceError(f"this engine was built for {self._report.target}, and there is no such device here")
            self._machine = relax.VirtualMachine(self._library, device)
        return self._machine["main"](*tensors)

    def _check_device(self, tensors) -> None:
        for spec, tensor in zip(self._signature.inputs, tensors, strict=True):
            if tensor.device.type != self._device_type or tensor.device.index not in (None, 0):
                raise InputError(f"{spec.name} is on {tensor.device}; the engine runs on {self._device_type}:0")


def load(path) -> Engine:
    """Load a saved engine; no PyTorch model is needed.

    Raises ArtifactError for a file that is truncated, altered, of another version, or made for another machine.  An
    artifact contains machine code: load only files that you trust as you would trust a program.
    """
    artifact = load_artifact(path)
    return Engine(
        artifact.library,
        artifact.export_library,
        Signature.from_json(artifact.signature),
        Report.from_dict(artifact.report),
        artifact.manifest["masks"],
    )
