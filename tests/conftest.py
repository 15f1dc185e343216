"""Shared by all tests: one thread a worker, quick imports, rare garbage collections, the run's own kernel cache."""

import os

import pytest

from tests.rare_collections import rare_collections

if "PYTEST_XDIST_WORKER" in os.environ:
    # TVM's worker threads spin while they wait, so two test workers with two threads each would fight for the cores.
    os.environ.setdefault("TVM_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # TVM binds a pool of one thread to the first core, and with it all that the process does, of every worker the same.
    os.environ.setdefault("TVM_BIND_THREADS", "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """TVMScript of test modules, and of what they import, is read without the source of pytest's frames."""
    if getattr(session.config.option, "numprocesses", None):  # the workers collect
        return (yield)
    from tir_kernels.compiling.quick_script import quick_script

    with quick_script():
        return (yield)


def pytest_runtestloop(session):
    """No garbage collection goes through what was imported and collected."""
    if not getattr(session.config.option, "numprocesses", None):
        rare_collections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Nor through what the tests of a file left in caches: compiling a kernel collects whatever is not frozen."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:  # the file's fixtures are gone
        rare_collections()
    return result


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """No test reads kernels that an earlier run left in the user's cache; the workers of one run share theirs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    previous = os.environ.get("STOF_CACHE_DIR")
    os.environ["STOF_CACHE_DIR"] = str(folder)
    yield folder
    if previous is None:
        del os.environ["STOF_CACHE_DIR"]
    else:
        os.environ["STOF_CACHE_DIR"] = previous
