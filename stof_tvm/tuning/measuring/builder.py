"""A MetaSchedule builder whose compiling processes live as long as the search."""

import os
import tempfile
import time
from concurrent.futures import Future, wait
from pathlib import Path

import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder
from tvm.support.popen_pool import PopenPoolExecutor

from stof_tvm.tuning.measuring import compile_worker
from stof_tvm.tuning.measuring.job import LIBRARY, KernelJob, ScheduleJob, short_reason, write_note
from stof_tvm.tuning.measuring.process import end_process, start_process
from tir_kernels.compiling.cache_folder import cache_dir
from tir_kernels.template import template_name
from tir_kernels.tuning.template_space import chosen
from tir_kernels.tuning.workload import mask_of, problem_of

WORKLOAD = "stof.workload"
BUILD_SECONDS = 60
CLOSE_SECONDS = 1.0
NICENESS = 10  # of compiling processes: the search itself and the measurements go first


@derived_object
class PoolBuilder(PyBuilder):
    """Compiles candidates in parallel; one that fails or takes too long gives a result with the reason.

    A candidate is one of three things.  A workload that is annotated with a template's configuration is built as that
    template's kernel.  A scheduled function, which names its workload in the attribute `stof.workload`, is built as it
    is.  A workload without either is built with its default schedule.  The result is a library, with a note for the
    runner beside it.

    Parameters
    ----------
    folder : Path
        Where libraries are written; whoever made the folder removes it.
    gpu_arch : str, optional
        The architecture of the GPU that will run the kernels.
    workers : int, optional
        Number of processes; by default one for each processor.
    templates : tuple
        The user's own templates, for the processes to know.
    """

    def __init__(self, folder: Path, gpu_arch: str | None = None, workers: int | None = None, templates: tuple = ()):
        self.folder, self.templates = Path(folder), templates
        self.workers = workers or len(os.sched_getaffinity(0))
        prepare = (
            f"{start_process(templates)}\n"
            f"from {compile_worker.__name__} import prepare\n"
            f"prepare({NICENESS}, {gpu_arch!r}, {str(cache_dir() / 'machine_code')!r})"
        )
        self.starting: list[Future] = []
        self.pool = PopenPoolExecutor(self.workers, BUILD_SECONDS, initializer=exec, initargs=(prepare,))

    def start(self) -> None:
        """Start every process, without waiting for any."""
        self.starting = [self.pool.submit(abs, 0) for _ in range(self.workers)]

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        wait(self.starting)
        return [_result(*started) for started in [self._start(build) for build in build_inputs]]

    def close(self) -> None:
        """End the processes, even while they compile."""
        threads = self.pool._threadpool
        threads.shutdown(wait=False, cancel_futures=True)
        self.pool._shutdown = True
        deadline = time.monotonic() + CLOSE_SECONDS
        # A thread may be about to start another process.
        while any(thread.is_alive() for thread in threads._threads) and time.monotonic() < deadline:
            for worker in list(self.pool._worker_map.values()):
                end_process(worker)
            time.sleep(0.01)
        for worker in list(self.pool._worker_map.values()):
            end_process(worker)

    def reference_folder(self, workload: str) -> Path:
        """The folder of the library of a workload with its default schedule."""
        return self.folder / f"reference-{workload}"

    def _start(self, build: BuilderInput) -> tuple[Path, Future]:
        mod, target = build.mod, dict(build.target.export())
        named = chosen(mod, self.templates)
        job: KernelJob | ScheduleJob
        if named is not None:
            folder = self._new_folder()
            template, config = named
            job = KernelJob(template_name(template), problem_of(mod), config, mask_of(mod), str(build.target))
            future = self.pool.submit(compile_worker.compile_kernel, job, target, str(folder))
        else:
            workload = mod["main"].attrs.get(WORKLOAD)
            is_default = workload is None
            reference = self.reference_folder(workload_name(mod) if is_default else str(workload))
            folder = reference if is_default else self._new_folder()
            job = ScheduleJob(_arguments(mod), str(reference))
            text = tvm.ir.save_json(mod)
            future = self.pool.submit(compile_worker.compile_schedule, text, target, str(folder), is_default)
        folder.mkdir(exist_ok=True)
        write_note(folder, job)
        return folder, future

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))


def workload_name(mod: tvm.IRModule) -> str:
    """A name of a workload, the same for equal workloads."""
    return f"{tvm_ffi.structural_hash(mod) & (2**64 - 1):016x}"


def _arguments(mod) -> tuple:
    return tuple((tuple(int(n) for n in info.shape), str(info.dtype)) for info in ArgInfo.from_entry_func(mod, False))


def _result(folder: Path, future: Future) -> BuilderResult:
    try:
        future.result()
    except TimeoutError:
        return BuilderResult(None, f"compiling took more than {BUILD_SECONDS} s")
    except ChildProcessError:
        return BuilderResult(None, "the compiler's process crashed")
    except Exception as error:
        return BuilderResult(None, f"it does not compile: {short_reason(error)}")
    return BuilderResult(str(folder / LIBRARY), None)
