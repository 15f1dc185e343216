import inspect
import threading
import time

import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.compiling.quick_script import quick_script


def add_one():
    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("add"):
                v = T.axis.spatial(4, i)
                y[v] = x[v] + T.float32(1)

    return kernel


def deep(function, depth):
    return function() if depth == 0 else deep(function, depth - 1)


def test_the_same_function_and_the_original_restored():
    original, outer = inspect.stack, inspect.getouterframes
    with quick_script():
        quick = add_one()
        frames = inspect.stack()
        assert frames[0].function == "test_the_same_function_and_the_original_restored"
        assert [f.function for f in frames] == [f.function for f in outer(inspect.currentframe())]
    assert inspect.stack is original and inspect.getouterframes is outer
    tvm.ir.assert_structural_equal(quick, add_one())


def test_restored_after_an_error():
    original = inspect.stack
    with pytest.raises(KeyError), quick_script():
        raise KeyError
    assert inspect.stack is original


def test_it_is_quick():
    def seconds():
        started = time.process_time()
        deep(add_one, 60)
        return time.process_time() - started

    add_one()
    slow = min(seconds() for _ in range(3))
    with quick_script():
        quick = min(seconds() for _ in range(3))
    assert quick < slow


def test_restored_after_threads_that_overlap():
    """The first to enter is not the last to leave."""
    original, first_is_in, second_wants_in = inspect.stack, threading.Event(), threading.Event()

    def first():
        with quick_script():
            first_is_in.set()
            second_wants_in.wait()
            add_one()

    def second():
        first_is_in.wait()
        second_wants_in.set()
        with quick_script(), quick_script():
            add_one()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inspect.stack is original and inspect.getouterframes.__module__ == "inspect"
