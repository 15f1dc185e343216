"""Writes `shapes.py`: the matrix products that an engine runs for each measured model, read from its segments.

print:  python benchmarks/products/record.py [--only MODEL …]      the products of some models
write:  python benchmarks/products/record.py --write              shapes.py of all; minutes, and 16 GB of memory

Every model of the zoo and of `gpu_models.py` is imported at its larger shape, in full width with two layers, and run
through the compiler up to its segments for sm_90a: so projections that the compiler merges are one product, and
convolutions that it turns into products are among them.  Each product counts without its epilogue, but for a bias; a
gated one has the columns of both halves.  The table of token embeddings gives the product of a language model's head.
Experts of mixtures are grouped products, which are no single product, and not among them.

A product of fewer than `LEAST_ROWS` rows, as of a time's embedding, is left out.  Others get the rows of a batch that
is doubled until there are `WANTED_ROWS`.  Of near-duplicates (`is_near`) the one of more rows and columns stays.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from benchmarks.models import families  # noqa: E402
from benchmarks.models.cases import MODELS as FAMILIES  # noqa: E402
from benchmarks.models.cases import SHAPES as FAMILY_SHAPES  # noqa: E402
from benchmarks.models.cases import ModelCase  # noqa: E402
from benchmarks.products.cases import ProductCase  # noqa: E402
from benchmarks.zoo.cases import ZooCase, zoo_cases  # noqa: E402
from benchmarks.zoo.make import make_inputs, make_model  # noqa: E402
from tir_kernels.fusion.problem import GemmProblem, MlpProblem  # noqa: E402

TARGET = "cuda -arch=sm_90a"
LAYERS = 2
LEAST_ROWS, WANTED_ROWS = 256, 4096
NEAR = 0.1  # sizes of near-duplicates differ by this share at most
MANY_COLUMNS = 1 << 14  # of which a tenth changes nothing but the time in proportion, as vocabularies have
SHAPES_FILE = Path(__file__).parent / "shapes.py"
HEADER = '"""The products of measured models, by `record.py`: (m, n, k, bias, w_layout, batch, matrices)."""\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="only models whose name holds one of these texts")
    parser.add_argument("--write", action="store_true", help="write shapes.py")
    options = parser.parse_args()
    found: set[ProductCase] = set()
    for case in largest_cases():
        if any(text in case.model for text in options.only):
            some = {scaled for one in products_of(case) if (scaled := with_rows(one)) is not None}
            print(f"{case.label}: {len(some)}", *(f"  {one.label}" for one in sorted(some)), sep="\n", flush=True)
            found |= some
    kept = merged(found)
    print(f"{len(kept)} of {len(found)} products are no near-duplicates")
    if options.write:
        rows = [(c.m, c.n, c.k, c.bias, c.w_layout, c.batch, c.matrices) for c in kept]
        text = "".join(f"    {str(row).replace(chr(39), chr(34))},\n" for row in rows)
        SHAPES_FILE.write_text(f"{HEADER}\nSHAPES = (\n{text})\n")
    return 0


def largest_cases() -> list[ZooCase | ModelCase]:
    """Each model once, at the shape of most elements."""
    largest = {case.model: case for case in sorted(zoo_cases(), key=lambda case: case.batch * case.length)}
    batch, length = max(FAMILY_SHAPES, key=lambda shape: shape[0] * shape[1])
    return [*largest.values(), *(ModelCase(model, batch, length) for model in FAMILIES)]


def products_of(case: ZooCase | ModelCase) -> Iterator[ProductCase]:
    """The products of a model's segments, and of its head."""
    from stof_tvm.frontend import import_model

    model, inputs = made(case)
    mod = import_model(model, tuple(inputs), None).mod
    tables = [module.weight.shape for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    del model
    gc.collect()
    yield from products_of_segments(mod)
    tokens = inputs[0].numel() if inputs[0].dtype == torch.int64 else 0
    if tokens and tables:
        n, k = max(tables)
        yield ProductCase(tokens, n, k)


def products_of_segments(mod) -> Iterator[ProductCase]:
    """The products that the compiler makes of an imported module."""
    from tvm import relax

    from relax_passes.fusion.matching.segment_problem import NoProblem, match_problem
    from relax_passes.fusion.partition_segments import SEGMENT
    from relax_passes.pipeline import run_pipeline
    from stof_tvm.site_masks import SiteMasks
    from tir_kernels.target import parse_target

    mod = run_pipeline(mod, parse_target(TARGET), SiteMasks(None), until="partition_segments")
    for function in mod.functions.values():
        if isinstance(function, relax.Function) and SEGMENT in function.attrs:
            try:
                problem = match_problem(function).problem
            except NoProblem:
                continue
            both = [problem.first, problem.second] if isinstance(problem, MlpProblem) else [problem]
            yield from (case_of(one) for one in both if isinstance(one, GemmProblem))


def case_of(problem: GemmProblem) -> ProductCase:
    """The product without its epilogue, but for a bias."""
    bias = problem.gate_bias or any(step.operand == "row" and step.kind == "add" for step in problem.steps[:1])
    sizes = problem.m, problem.w_columns, problem.k
    return ProductCase(*sizes, bias, problem.w_layout, problem.batch, problem.matrices, problem.dtype)


def made(case: ZooCase | ModelCase) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model of two layers in full width, and inputs."""
    if isinstance(case, ModelCase):
        return families.make_model(case), families.make_inputs(case, 1, "cpu")
    return make_model(case, layers=LAYERS), make_inputs(case, 1, "cpu")


def with_rows(case: ProductCase) -> ProductCase | None:
    """The case with a batch doubled until it has enough rows; None where few rows are all that it ever has."""
    if case.m < LEAST_ROWS:
        return None
    while case.m < WANTED_ROWS:
        case = replace(case, m=2 * case.m, batch=2 * case.batch if case.batch > 1 else 1)
    return case


def merged(cases: set[ProductCase]) -> list[ProductCase]:
    """The cases without near-duplicates, sorted."""
    kept: list[ProductCase] = []
    for case in sorted(cases, reverse=True):
        if not any(is_near(case, other) for other in kept):
            kept.append(case)
    return sorted(kept)


def is_near(one: ProductCase, other: ProductCase) -> bool:
    """Whether two products differ by little in rows, and in columns only where these are many and as even."""
    if replace(one, m=other.m, n=other.n, batch=other.batch) != other or (one.batch > 1) != (other.batch > 1):
        return False
    many = min(one.n, other.n) >= MANY_COLUMNS and one.n % 8 == other.n % 8
    return _is_near(one.m, other.m) and (one.n == other.n or many and _is_near(one.n, other.n))


def _is_near(a: int, b: int) -> bool:
    return abs(a - b) <= NEAR * max(a, b)


if __name__ == "__main__":
    sys.exit(main())
