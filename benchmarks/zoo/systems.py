"""What runs a model of the zoo as it is: our engine by its defaults or by tuning logs, and PyTorch, compiled or not."""

import time
from collections import Counter
from collections.abc import Callable

import torch

from benchmarks.models.systems import System
from benchmarks.zoo.cases import ZooCase
from benchmarks.zoo.make import make_inputs, make_model
from relax_passes.fusion.lower_segments import DEFAULT, DEFERRED

OURS = "stof"
TUNED = "stof-tuned"
COMPILED = ("compile-sdpa", "compile-flex")
DEFAULT_SYSTEMS = (OURS, *COMPILED)
ALL = (*DEFAULT_SYSTEMS, TUNED, "eager")
CALLS_TO_CAPTURE = 3  # reduce-overhead runs, then captures, then replays
CAUSES = 40  # kinds of segments without template that a row lists
CAUSE_LENGTH = 200


def prepare(name: str, case: ZooCase, device: str, small: bool = False, logs: str | None = None) -> tuple[System, dict]:
    """A system, and what the row tells of it; on the CPU, for dry runs, what should compile stays eager.

    `logs` is the folder of the logs that "stof-tuned" is built with.
    """
    if name in (OURS, TUNED):
        return _stof(case, device, small, logs if name == TUNED else None)
    model = make_model(case, "flex_attention" if name == "compile-flex" else "sdpa", small).to(device)
    variant = f"torch {torch.__version__}, {model.attention} attention"
    if device == "cpu":
        return System(torch.compiler.set_stance("force_eager")(model.forward), variant), {}
    if name == "eager":
        return System(model, variant), {}
    call, mode = _compiled(model, make_inputs(case, 1, device)[0])
    return System(call, f"{variant}, {mode}"), {}


def _compiled(model, x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    """The compiled model, which was called with x, and its mode; models that CUDA graphs refuse go without them."""
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def call(x):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    try:
        for _ in range(CALLS_TO_CAPTURE):
            call(x)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise  # beside other processes, and no refusal
    except RuntimeError as error:
        torch.compiler.reset()
        return torch.compile(model, dynamic=False), f"without CUDA graphs: {str(error)[:CAUSE_LENGTH]}"
    return call, "reduce-overhead"


def _stof(case: ZooCase, device: str, small: bool, logs: str | None) -> tuple[System, dict]:
    """The engine with the model's own masks; `logs` is the folder of the tuning logs, None: by defaults.

    It is not verified, because that runs the model where it is, on the CPU: errors are measured on the GPU anyway.
    """
    import stof_tvm

    model = make_model(case, small=small)
    start = time.perf_counter()
    target = "llvm" if device == "cpu" else None
    example = tuple(make_inputs(case, 1, "cpu"))
    engine = stof_tvm.build(model, target, example, tuning_logs=logs or False, verify=False)
    seconds, report = time.perf_counter() - start, engine.report()
    kernels = sum(segment.kernel not in (DEFAULT, DEFERRED) for segment in report.segments)
    sites = ", ".join(sorted({f"{site.kernel} {site.config}" for site in report.rewritten}))
    variant = f"{sites or 'no attention kernel'}; {len(report.segments)} segments, {kernels} on templates"
    facts = {"build_s": round(seconds, 1), "defaults": defaults(report), "dense": dense(report)}
    return System(engine, f"{variant}; {model.attention} attention"), facts


def defaults(report) -> list[list]:
    """[operators, reason, count] of the segments that no template computes, the most frequent first."""
    return _counted(
        (" ".join(segment.operators), segment.reason) for segment in report.segments if segment.kernel == DEFAULT
    )


def dense(report) -> list[list]:
    """[spelling, reason, count] of the attentions that no template computes."""
    return _counted((site.spelling, site.reason) for site in report.not_rewritten)


def _counted(causes) -> list[list]:
    found = Counter((what[:CAUSE_LENGTH], reason[:CAUSE_LENGTH]) for what, reason in causes)
    return [[*cause, count] for cause, count in found.most_common(CAUSES)]
