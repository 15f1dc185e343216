"""Writes the reference of the public interface, from docstrings: `python docs/reference.py build/docs`.

Exits with 1 where pdoc warns: something that cannot be imported, documented or linked.
"""

import sys
import warnings
from pathlib import Path

import pdoc.render

ROOT = Path(__file__).parents[1]
# A package stands for its `__all__`, or for all its public modules where it has none.
MODULES = (
    "stof_tvm",
    "stof_tvm.tuning.tune",
    "stof_tvm.tuning.search",
    "stof_tvm.tuning.tuning_report",
    "relax_passes",
    "tir_kernels",
)


def write(folder: Path, show_source: bool = True) -> list[str]:
    """Write the pages into `folder` and return what pdoc warned of."""
    pdoc.render.configure(
        docformat="numpy", template_directory=ROOT / "docs" / "templates", show_source=show_source, search=show_source
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=folder)
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    warned = write(Path(sys.argv[1]))
    print("\n".join(warned) or f"{sys.argv[1]}/index.html")
    sys.exit(1 if warned else 0)
