"""The generated CUDA of a case: what is hashed, compiled for GPUs that are not here, and run on the CPU."""

import ast
import functools
import hashlib
import re
from pathlib import Path

import tvm

from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.target import parse_target


@functools.cache
def source(template, problem, config, arch="sm_80") -> str:
    target = parse_target(f"cuda -arch={arch}")
    with quick_script():
        func = template.instantiate(problem, config, target).with_attr("global_symbol", "main")
    with target:
        return cuda_source(tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx"))


def architectures(case) -> tuple[str, ...]:
    """What a case is compiled for: a kernel of Hopper's own instructions for Hopper alone."""
    only = getattr(case, "arch", None)
    return (only,) if only else ("sm_80", "sm_90a")


def source_of(case) -> str:
    """A case's source; the same for each of its architectures."""
    return source(case.template, case.problem, case.config, architectures(case)[0])


def distinct(cases) -> list:
    """One case for each source: masks and biases' values change no kernel."""
    return list({(case.template.NAME, case.problem, case.config): case for case in cases}.values())


def launch_bounds(text: str) -> tuple[int, int]:
    """Threads of a CTA and the CTAs that must fit on one multiprocessor together, as its source promises."""
    threads, ctas = re.search(r"__launch_bounds__\((\d+)(?:, (\d+))?\) main_kernel", text).groups(default="1")
    return int(threads), int(ctas)


def fingerprint() -> str:
    """SHA-256 of all that decides the generated sources: the kernels' Python, the cases, and TVM's version.

    Comments and docstrings decide nothing, nor do predicted times and what is chosen by them, as a case names its
    configuration.
    """
    here, package = Path(__file__).parent, Path(__file__).parents[2] / "tir_kernels"
    cases = [path for path in here.glob("*_cases.py") if not path.name.startswith("test_")]
    choices = {"cost.py", "prediction", "select.py"}
    kernels = [path for path in package.rglob("*.py") if not choices & {*path.relative_to(package).parts}]
    files = [*kernels, *cases]
    texts = (decisive(path.read_text()) for path in sorted(files))
    return hashlib.sha256("\n".join([tvm.__version__, *texts]).encode()).hexdigest()


def decisive(text: str) -> str:
    """Python source without its docstrings and lines of comments, the same for every version of Python."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = [""] * (last - first)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
