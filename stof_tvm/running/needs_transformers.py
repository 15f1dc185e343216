"""Whether transformers is installed, in a version that this project knows."""

import contextlib
import sys

from tir_kernels.errors import UnsupportedError

LEAST = 5  # major version
INSTALL = "pip install 'transformers>=5.17,<6'"


@contextlib.contextmanager
def needs_transformers(what: str):
    """A context that imports transformers: UnsupportedError, which names `what` needs it, if it is missing or too old.

    What else the import raises, as where a package that transformers needs is missing or broken, is raised as it is.
    """
    cause = None
    try:
        yield
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise UnsupportedError(f"{what} needs transformers {LEAST}, which is not installed: {INSTALL}") from error
        if not _is_old(_version()):  # else what is imported may not be there yet
            raise
        cause = error
    if _is_old(version := _version()):
        raise UnsupportedError(f"{what} needs transformers {LEAST}, and {version} is installed: {INSTALL}") from cause


def _version() -> str:
    return getattr(sys.modules.get("transformers"), "__version__", str(LEAST))


def _is_old(version: str) -> bool:
    return int(version.partition(".")[0]) < LEAST
