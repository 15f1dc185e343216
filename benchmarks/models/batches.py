"""A plan of measurements, done in batches: processes get ready in parallel and are measured one after another."""

import functools
import os
import time
from collections.abc import Callable

from benchmarks.models.worker import Worker

COMPILE_THREADS = "2"  # of PyTorch's compiler, in each process


def measure_plan(
    plan: list[tuple],
    start_worker: Callable[..., Worker],
    add: Callable[[Worker, dict], None],
    after_batch: Callable[[list], None],
    options,
    add_part: Callable[[Worker, dict], None] | None = None,
    fit: Callable[[list[tuple]], int] = len,
) -> list[tuple]:
    """Measure (case, system) pairs in order; what the deadline left over.

    Parameters
    ----------
    start_worker
        Takes a case and a system.
    add
        Takes a worker and its fields of the row, as soon as they are known.
    after_batch
        Takes the cases of a batch when it is done.
    options
        `workers` processes at a time; `prepare_s` seconds until what is ready is measured; `deadline_s` seconds after
        which nothing more is.
    add_part
        Takes a worker and the fields of each row, where processes measure several; what `add` then takes is no row.
    fit
        How many of these, from the first on, the machine has room for at a time.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_THREADS)
    start = time.monotonic()
    deadline = start + options.deadline_s
    print(f"{len(plan)} measurements", flush=True)
    while plan and time.monotonic() < deadline:
        count = max(1, fit(plan[: options.workers]))
        batch, plan = plan[:count], plan[count:]
        workers = [start_worker(case, system) for case, system in batch]
        try:
            prepared = min(deadline, time.monotonic() + options.prepare_s)
            late = [worker for worker in workers if not worker.is_ready(prepared)]
            print(f"ready after {time.monotonic() - start:.0f} s, but for {len(late)}", flush=True)
            # What is late goes on compiling while others are timed, so its processes come last.
            for worker in sorted(workers, key=lambda worker: worker in late):
                parts = functools.partial(add_part, worker) if add_part is not None else None
                add(worker, worker.measure(deadline, parts))
        finally:
            for worker in workers:
                worker.close()
        after_batch(list(dict.fromkeys(case for case, _ in batch)))
    print(f"{time.monotonic() - start:.0f} s")
    return plan
