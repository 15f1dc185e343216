"""What runs a model: this project's engine, ONNX Runtime, and PyTorch eager or compiled, all on the same threads."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cpu.cases import make_input, make_model
from benchmarks.models.cases import ModelCase

OURS, EAGER, COMPILED, COMPILED_MAX, ONNX = "stof", "eager", "compile-sdpa", "compile-sdpa-max", "onnxruntime"
ALL = (OURS, ONNX, COMPILED, COMPILED_MAX, EAGER)
DEFAULT = (OURS, ONNX, COMPILED, EAGER)


@dataclass(frozen=True)
class System:
    """`call()` computes the last hidden state (1, tokens, hidden), float32, of the case's input; `variant` is what."""

    call: Callable[[], torch.Tensor]
    variant: str


def prepare(name: str, case: ModelCase, threads: int, folder: Path, small: bool = False) -> System:
    """Make a system ready; what it exports stays in `folder`.  `small` is for dry runs: compiled peers stay eager."""
    torch.set_num_threads(threads)
    if name == OURS:
        return _stof(case, small)
    if name == ONNX:
        return _onnxruntime(case, threads, folder, small)
    model, x = make_model(case, small=small), make_input(case)
    if name == EAGER or small:
        return System(lambda: model(x), f"torch {torch.__version__}")
    import torch._inductor.config as inductor

    inductor.freezing = True  # weights are constants, as they are for the others
    mode = "max-autotune" if name == COMPILED_MAX else "default"
    compiled = torch.compile(model, mode=mode, dynamic=False)
    return System(lambda: compiled(x), f"torch {torch.__version__} inductor, freezing, {mode}")


def _stof(case: ModelCase, small: bool) -> System:
    import stof_tvm

    x = make_input(case)
    engine = stof_tvm.build(make_model(case, small=small), "llvm", (x,), tuning_logs=False, verify=False, strict=True)
    sites = {f"{site.kernel} {site.config}" for site in engine.report().rewritten}
    return System(lambda: engine(x), f"{', '.join(sorted(sites))}; not tuned")


def _onnxruntime(case: ModelCase, threads: int, folder: Path, small: bool) -> System:
    """The fastest of four graphs: attention as SDPA or as single operators, fused by onnxruntime.transformers or not.

    All go through every graph optimisation of a session.  The file of the fastest is kept and found again.
    """
    import onnxruntime

    x = {"x": make_input(case).numpy()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL

    def session(path: Path):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    stem = f"{'small-' if small else ''}{case.model}-{case.shape}-"
    kept = sorted(folder.glob(f"{stem}*.onnx"))
    if not kept:
        seconds: dict[Path, float] = {}
        with tempfile.TemporaryDirectory(dir=folder) as candidates:
            for attention in ("sdpa", "eager"):
                for path in _exported(case, attention, Path(candidates), stem, small):
                    seconds[path] = _least_seconds(session(path), x)
            fastest = min(seconds, key=lambda path: seconds[path])
            kept = [fastest.rename(folder / fastest.name)]
    best = session(kept[0])
    call = lambda: torch.from_numpy(best.run(None, x)[0])
    return System(call, f"onnxruntime {onnxruntime.__version__}, {kept[0].stem.removeprefix(stem)}")


def _exported(case: ModelCase, attention: str, folder: Path, stem: str, small: bool) -> list[Path]:
    from onnxruntime.transformers import optimizer

    plain, fused = (folder / f"{stem}{attention}{suffix}.onnx" for suffix in ("", "-fused"))
    model = make_model(case, attention, small)
    torch.onnx.export(model, (make_input(case),), str(plain), dynamo=False, opset_version=17, input_names=["x"])
    kind = "vit" if case.model == "vit" else "bert"
    heads, hidden = (2, 32) if small else (12, 768)
    optimizer.optimize_model(
        str(plain), model_type=kind, num_heads=heads, hidden_size=hidden, opt_level=0, use_gpu=False
    ).save_model_to_file(str(fused))
    return [plain, fused]


def _least_seconds(session, x, calls: int = 3) -> float:
    session.run(None, x)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        session.run(None, x)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
