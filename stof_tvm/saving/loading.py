"""`load`: engines from files."""

from stof_tvm.engine import Engine, load_engine
from stof_tvm.saving.range_file import is_range_file


def load(path) -> Engine:
    """Load the engine that was saved as `path`, of one shape or of a range; no PyTorch model is needed.

    Raises ArtifactError for a file that is truncated, altered, of another version, or made for another machine.  An
    artifact contains machine code: load only files that you trust as you would trust a program.
    """
    if is_range_file(path):
        from stof_tvm.buckets.loaded import load_range  # an engine of one shape needs nothing of ranges

        return load_range(path)
    return load_engine(path)
