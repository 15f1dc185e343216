"""`tune`: the two-stage search of a model's fusion scheme and kernel parameters."""

import contextlib
import platform
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tvm

from relax_passes.extensions import NO_EXTENSIONS, Extensions
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, is_legal
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.tuned_scheme import graph_key
from relax_passes.fusion.template_choice import TemplateChooser
from stof_tvm.frontend import import_model
from stof_tvm.given_masks import GivenAsMask
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.measuring.builder import PoolBuilder
from stof_tvm.tuning.measuring.job import keep_mask
from stof_tvm.tuning.measuring.measure import Measurer
from stof_tvm.tuning.measuring.rpc import rpc_runner
from stof_tvm.tuning.measuring.runner import ProcessRunner
from stof_tvm.tuning.progress import ProgressBar
from stof_tvm.tuning.search.contexts import import_intrinsics
from stof_tvm.tuning.search.model_tasks import ModelTasks, model_tasks
from stof_tvm.tuning.search.searched_model import KernelChoice, Kernels, SearchedModel
from stof_tvm.tuning.search.segments import Segments
from stof_tvm.tuning.search.stage_one import StageOne, Step
from stof_tvm.tuning.search.state import Options, Search, Trial
from stof_tvm.tuning.tuning_report import TaskRow, TuningReport
from tir_kernels.errors import DeviceError, InputError
from tir_kernels.fusion.registry import templates_for
from tir_kernels.target import local_cuda_arch, parse_target
from tir_kernels.tuning.template_space import check_decisions

__all__ = ["TuningResult", "tune"]

LEAST_GAIN = {"cuda": 0.01, "llvm": 0.05}  # share of the segments' time that a kept move must save; less may be noise


@dataclass(frozen=True)
class TuningResult:
    """What a search found.

    Attributes
    ----------
    best : dict
        "scheme" in hexadecimal; "us", the sum of the best times of the model's kernels (None where the search ended
        before all had one); "known_us", this sum as the log knew it before the search (None where a time was missing);
        and "default_us", the sum for the kernels of a build without logs.
    history : tuple of Trial
    steps : tuple of Step
        The moves of stage 1.
    report : TuningReport
        `report.write(path)` makes a page of it.
    is_interrupted : bool
        Whether Ctrl-C ended the search; everything measured is in the log.
    """

    best: dict
    history: tuple[Trial, ...]
    steps: tuple[Step, ...]
    report: TuningReport
    is_interrupted: bool


def tune(
    model: torch.nn.Module | torch.export.ExportedProgram,
    target: str | dict | tvm.target.Target | None = None,
    example_inputs: tuple | list | dict | torch.Tensor | None = None,
    mask: GivenAsMask | Mapping[str, GivenAsMask] | str | Path | None = None,
    *,
    work_dir: str | Path = "tuning_logs",
    max_trials: int = 256,
    max_seconds: float | None = None,
    seed: int = 0,
    progress: bool = True,
    rpc_tracker: str | None = None,
    rpc_key: str | None = None,
    options: Options | None = None,
    templates: Iterable = (),
    rules: Iterable[tvm.transform.Pass] = (),
) -> TuningResult:
    """Search the fusion scheme and the kernels' parameters of a model, and log what is measured for `build` to replay.

    Stage 1 moves the borders between segments, stage 2 tunes their kernels and those of the attentions.  Everything
    measured is in the log at once: a search that is interrupted, or run again, goes on from there, and several
    processes may share a log.

    Parameters
    ----------
    model, target, example_inputs, mask
        As for `build`; example inputs are tensors of any shape (batch, length, …) and dtype that the model takes.
    work_dir : path
        The folder of the logs, with a folder in it for each target architecture.
    max_trials : int
        Most candidates to measure, including those whose time the log knows.
    max_seconds : float, optional
        Seconds from the call; trials under way then are still finished.
    seed : int
        The seed of all random choices.
    progress : bool
        Show a progress bar on stderr.
    rpc_tracker, rpc_key : str, optional
        "host:port" of a TVM RPC tracker and the key of the devices that measure, instead of this machine's.  Results
        are not compared with PyTorch's there, and attentions, which need their masks' data, are not measured.
    options : Options
        Which parts of the search are switched on; for ablations.
    templates, rules
        As for `build`, which needs the same ones to replay what was found.  The configurations of a template are
        searched beside those of the project's.  Its `Config` must be a dataclass of integers and booleans.  If its code
        needs its own source, as TVMScript does, other processes must be able to import its module.

    Raises
    ------
    StofError
        What `build` raises; DeviceError where this machine has no device for the target.
    """
    started = time.perf_counter()
    options = options or Options()
    _check_limits(max_trials, max_seconds)
    target = parse_target(target)
    site_masks = SiteMasks(mask)
    extensions = Extensions(templates, rules)
    check_decisions(extensions.templates)
    log = TuningLog(work_dir, target)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stof_tune_", ignore_cleanup_errors=True)))
        if rpc_tracker is None:
            measurer = stack.enter_context(local_measurer(folder, log, seed, options.cache, extensions.templates))
        else:
            measurer = stack.enter_context(rpc_measurer(folder, log, rpc_tracker, rpc_key or "", extensions.templates))
        imported = import_model(model, *_example_call(example_inputs))
        tasks = model_tasks(imported.mod, target, site_masks, extensions)
        if rpc_tracker is not None:
            tasks = replace(tasks, attentions=())
        for attention in tasks.attentions:
            for task in (attention.whole, *attention.parts):
                if task.digest is not None:
                    keep_mask(folder, task.digest, task.mask)
        bar = ProgressBar(max_trials, progress)
        stack.callback(bar.close)
        search = Search(log, measurer, options, seed, max_trials, bar)
        search.started = started
        deadline = None if max_seconds is None else started + max_seconds
        return run_search(search, tasks, deadline, extensions)


def _check_limits(max_trials, max_seconds) -> None:
    if not isinstance(max_trials, int) or isinstance(max_trials, bool) or max_trials < 1:
        raise InputError(f"max_trials={max_trials!r} must be a positive integer")
    if max_seconds is not None and not (isinstance(max_seconds, int | float) and max_seconds > 0):
        raise InputError(f"max_seconds={max_seconds!r} must be positive, or None")


def run_search(
    search: Search, tasks: ModelTasks, deadline: float | None, extensions: Extensions = NO_EXTENSIONS
) -> TuningResult:
    """Run both stages, and return what they found, also when interrupted."""
    target, options = search.log.target, search.options
    if options.defaults:  # attentions compile while the scheme is made
        search.begin(task for attention in tasks.attentions for task in (attention.whole, *attention.parts))
    chooser = TemplateChooser(target, [*extensions.templates_for(target), *templates_for(target)])
    segments = Segments(tasks.graph, chooser)
    initial, key = InitialScheme(chooser)(tasks.graph), graph_key(tasks.graph)
    scheme = _known_scheme(search, key, tasks.graph.operators) or initial
    search.model = _model(tasks, segments, scheme)
    known_us = search.latency_us()

    def measured(ranges: list[range], samples: int) -> list[float | None]:
        search.begin((task for segment in ranges for task, _ in segments[segment].tasks), samples)
        wait()
        return [_segment_us(search, segments[segment]) for segment in ranges]

    def wait() -> None:
        # While candidates compile, prepare what stage 2 needs.  Not in a thread: CPython 3.11 fails at times where two
        # threads parse.
        if len(search.trials) + len(search.under_way) < search.max_trials:
            with search.measurer.quiet.work():
                import_intrinsics()
                search.rank_ahead()
        search.wait()

    def is_over() -> bool:
        return len(search.trials) >= search.max_trials or deadline is not None and time.perf_counter() > deadline

    structure, predict = lambda segment: id(segments[segment]), lambda segment: segments[segment].predicted_us
    least_gain = LEAST_GAIN[target.kind.name]
    stage_one = StageOne(tasks.graph.operators, structure, predict, measured, options.samples, least_gain)
    is_interrupted = False
    times = {"model": time.perf_counter() - search.started}
    try:
        if options.defaults:
            search.begin(task for task, _ in search.model.kernels)
        if options.stage_one:
            scheme = stage_one.run(scheme, options.max_moves, is_over)
            search.model = _model(tasks, segments, scheme)
        wait()
        times["stage_one"] = time.perf_counter() - search.started - times["model"]
        search.tune(search.model.kernels, deadline)
    except KeyboardInterrupt:
        is_interrupted = True
    total = time.perf_counter() - search.started
    times["stage_two"] = total - sum(times.values())
    times |= {"waiting": search.measurer.waited, "deciding": search.deciding.seconds}
    us = search.latency_us()
    if search.trials and us is not None:  # if interrupted before every kernel had a time, there is no sum to write down
        search.log.save_scheme(key, scheme.hex, us, search.measurer.gpu)
    default = _model(tasks, segments, initial)
    if not options.defaults and not is_interrupted:
        search.measure_defaults(task for task, _ in default.kernels)
    default_us = _default_us(search, default)
    best = {"scheme": scheme.hex, "us": us, "known_us": known_us, "default_us": default_us}
    history, steps = tuple(search.trials), tuple(stage_one.history)
    rows = tuple(_row(search, task, count) for task, count in search.model.kernels)
    report = TuningReport(str(target), search.measurer.gpu, best, history, steps, rows, times)
    return TuningResult(best, history, steps, report, is_interrupted)


def _known_scheme(search: Search, key: str, operators) -> FusionScheme | None:
    """The scheme where an earlier search ended, if it is still legal."""
    known = search.log.scheme(key, search.measurer.gpu) if search.options.cache else None
    scheme = None if known is None else FusionScheme.parse(known.scheme)
    return scheme if scheme is not None and is_legal(scheme, operators) else None


def _model(tasks: ModelTasks, segments: Segments, scheme: FusionScheme) -> SearchedModel:
    """The kernels that the model runs with a scheme."""
    choices = list(SearchedModel.of(segments.tasks(scheme)).choices)
    for attention in tasks.attentions:
        alternatives: tuple[Kernels, ...] = (((attention.whole, attention.count),),)
        if attention.parts:
            alternatives += (tuple((part, attention.count) for part in attention.parts),)
        choices.append(KernelChoice(alternatives))
    return SearchedModel(tuple(choices))


def _segment_us(search: Search, segment) -> float | None:
    times = [(count, search.state(task).best_us) for task, count in segment.tasks]
    return None if any(us is None for _, us in times) else sum(count * us for count, us in times)


def _default_us(search: Search, model: SearchedModel) -> float:
    """The sum of the defaults' measured times; where one was not measured, its best or predicted time counts."""

    def us(task) -> float:
        state = search.state(task)
        return state.default_us or state.best_us or task.predicted_us or 0.0

    return model.us(us) or 0.0


def _row(search: Search, task, count: int) -> TaskRow:
    state = search.state(task)
    return TaskRow(task.name, count, state.trials, state.default_us, state.best_us, dict(state.failures))


def _example_call(inputs) -> tuple:
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


@contextlib.contextmanager
def local_measurer(folder: Path, log: TuningLog, seed: int, use_cache: bool, templates: tuple = ()):
    """A Measurer on this machine's device, whose processes start at once and end with the context."""
    device = "cuda" if log.target.kind.name == "cuda" else "cpu"
    if not tvm.device(device).exist:
        kind = log.target.kind.name
        raise DeviceError(f"there is no {kind} device here to measure on; rpc_tracker uses those of other machines")
    builder = PoolBuilder(folder, local_cuda_arch() if device == "cuda" else None, templates=templates)
    runner = ProcessRunner(device, seed, templates=templates)
    builder.start()
    runner.start()
    is_cpu = device == "cpu"
    measurer = Measurer(builder, runner, log, device, device_name(device), builder.workers, use_cache, is_cpu)
    try:
        yield measurer
    finally:
        measurer.close()
        builder.close()
        runner.close()


@contextlib.contextmanager
def rpc_measurer(folder: Path, log: TuningLog, tracker: str, key: str, templates: tuple = ()):
    """A Measurer that compiles here and runs on the devices of a tracker, which are known by their key."""
    is_cuda = log.target.kind.name == "cuda"
    builder = PoolBuilder(folder, str(log.target.attrs["arch"]) if is_cuda else None, templates=templates)
    runner = rpc_runner(tracker, key, builder.workers)
    builder.start()
    measurer = Measurer(builder, runner, log, "cuda" if is_cuda else "cpu", key, builder.workers)
    try:
        yield measurer
    finally:
        measurer.close()
        builder.close()


def device_name(device: str) -> str:
    """The name of GPU 0 or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        named = None
    return named.group(1) if named else platform.processor() or platform.machine()
