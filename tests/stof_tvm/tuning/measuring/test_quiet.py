"""Measurements alone, work together."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stof_tvm.tuning.measuring.quiet import Quiet


@pytest.mark.parametrize("is_needed", [True, False])
def test_nothing_works_during_a_measurement(is_needed):
    quiet, lock, now, seen = Quiet(is_needed), threading.Lock(), {"work": 0, "measurement": 0}, set()

    def do(kind):
        with getattr(quiet, kind)():
            with lock:
                now[kind] += 1
                seen.add((now["work"], now["measurement"]))
            time.sleep(0.002)
            with lock:
                now[kind] -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(do, ["work", "work", "measurement", "work"] * 20))
    alone = all(work * measurement == 0 and measurement <= 1 for work, measurement in seen)
    assert alone == is_needed and any(work > 1 for work, _ in seen)


def test_a_waiting_measurement_goes_before_new_work():
    quiet, order, started = Quiet(True), [], threading.Event()

    def measure():
        with quiet.measurement():
            order.append("measurement")

    def work():
        with quiet.work():
            order.append("work")

    with ThreadPoolExecutor(2) as threads:
        with quiet.work():
            threads.submit(measure)
            while not quiet.waiting:
                time.sleep(0.001)
            threads.submit(work)
            time.sleep(0.02)
            assert order == [] and not started.is_set()
    assert order == ["measurement", "work"]


def test_what_fails_leaves_nothing_behind():
    quiet = Quiet(True)
    for kind in (quiet.work, quiet.measurement) * 2:
        with pytest.raises(KeyboardInterrupt), kind():
            raise KeyboardInterrupt
    assert (quiet.working, quiet.measuring, quiet.waiting) == (0, False, 0)
