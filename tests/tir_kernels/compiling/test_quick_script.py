import contextlib
import inspect
import threading
import time

import pytest
import tvm
from tvm.script import tirx as T
from tvm.script.parser.core import evaluator
from tvm.script.parser.core.diagnostics import Source

from tir_kernels.compiling.quick_script import quick_script


def add_one():
    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("add"):
                v = T.axis.spatial(4, i)
                y[v] = x[v] + T.float32(1)

    return kernel


def add_twice():
    """A kernel of all kinds of expressions, some expanded from a function that is inlined several times."""
    shape, names = [4, 2], {"dtype": "float32"}

    @T.inline
    def add(x, y, i, j, more):
        y[i, j] += x[i, j] * T.float32(more) + T.Cast(value=T.min(*[i, j + 1]), **names)

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer(tuple(shape), "float32"), y: T.Buffer((shape[0], 2), **names)):
        @T.inline
        def negate(i, j):
            y[i, j] = -y[i, j]

        for i, j in T.grid(*shape):
            with T.sblock("add"):
                v, w = T.axis.remap("SS", [i, j])
                y[v, w] = T.if_then_else(v > 1 and w == 0, x[v, w], T.float32(-1))
                add(x, y, v, w, max([n for n in (1, 3)]))
                add(x, y, v, w, more=len(shape))
                negate(v, w)
                negate(v, 0)
                y[v, w] = x[v, w] if shape[1:] == [2] else y[v, 1 - w]

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


def test_expressions_are_what_python_makes_of_them():
    original, tree = evaluator._eval_expr, Source.as_ast
    plain = add_twice()
    with quick_script():
        quick = [add_twice() for _ in range(2)]  # the second one from the kept text
        assert evaluator._eval_expr is not original
    assert evaluator._eval_expr is original and Source.as_ast is tree
    for kernel in quick:
        tvm.ir.assert_structural_equal(kernel, plain)


def test_errors_are_those_of_the_parser():
    def wrong():
        @T.prim_func(s_tir=True)
        def kernel(x: T.Buffer((4,), "float32")):
            x[0] = T.no_such_operator(x[0])

    for context in (contextlib.nullcontext, quick_script):
        with context(), pytest.raises(Exception, match="no_such_operator"):
            wrong()


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
