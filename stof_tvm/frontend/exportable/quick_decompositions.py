"""Decompositions of torch.export without their slow start, which is more than half of what a small program takes.

`run_decompositions` asks twice for the composite operators of each of some 26 namespaces, and each time every one in
the process is looked up first, in all namespaces.  Then it gives each a dozen kernels by `py_impl`, and each call of
that evaluates the annotations of a function that it defines.
"""

import contextlib

from torch._C import DispatchKey
from torch._export import utils
from torch._ops import OperatorBase


@contextlib.contextmanager
def quick_decompositions():
    """A context in which PyTorch looks composite operators up once, so none may be registered meanwhile.

    PyTorch's functions belong to the whole process, so only one thread at a time may replace them (one_at_a_time.py).
    """
    look_up, py_impl = getattr(utils, "_materialize_cpp_cia_ops", None), OperatorBase.py_impl
    if look_up is None:  # a PyTorch that looks them up another way
        yield
        return
    is_done = False

    def once() -> None:
        nonlocal is_done
        if not is_done:
            look_up()
            is_done = True

    def quick_py_impl(operator, key):
        if not isinstance(key, DispatchKey) or key == DispatchKey.Python or key in operator.py_kernels:
            return py_impl(operator, key)

        def register(kernel):
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return register

    utils._materialize_cpp_cia_ops = once
    setattr(OperatorBase, "py_impl", quick_py_impl)  # noqa: B010  (mypy knows no assignment to a method)
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = look_up
        setattr(OperatorBase, "py_impl", py_impl)  # noqa: B010
