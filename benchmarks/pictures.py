"""Draws the committed results: `python benchmarks/pictures.py [--gpu nvidia-h200] [--out docs/pictures]`.

Writes one .svg a picture, of what `benchmarks/results/<gpu>` holds; nothing is measured.  The masks that the pages in
docs show are drawn as well.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["MPLBACKEND"] = "Agg"

from benchmarks.fusion.results import FusionResults  # noqa: E402
from benchmarks.models.results import ModelResults  # noqa: E402
from benchmarks.peers.cases import Case, attention_case  # noqa: E402
from benchmarks.peers.results import (  # noqa: E402
    BANDWIDTH,
    MATRIX_RATE,
    Results,
    best,
    bytes_moved,
    read_rows,
    useful_tflops,
)
from stof_tvm import masks, pictures  # noqa: E402

FORMAT = ".svg"
BAR_SHAPE = (8, 12, 4096, 64)
BAR_MASKS = ("sliding_window", "longformer", "bigbird", "strided", "document", "causal")
SYSTEMS = {"compile-sdpa": "torch.compile, SDPA", "compile-flex": "torch.compile, Flex"}
KERNELS = {"gemm": "GEMM + bias + GELU", "gemv": "GEMV + bias + GELU", "gemm-norm": "GEMM + bias + residual + norm"}
WINDOW = masks.sliding_window(32)
HEADS = masks.per_head([WINDOW, WINDOW | masks.global_tokens(16), masks.causal(), masks.strided(32)])
CANVAS, TILE = (4, 16, 16), (2, 4, 8)
VIDEO = masks.per_head(
    [
        masks.sliding_tile(CANVAS, TILE, (2, 12, 8)),
        masks.sliding_tile(CANVAS, TILE, (2, 12, 8), order="row-major"),
        masks.neighborhood(CANVAS, (3, 7, 7), tile=TILE),
        masks.radial(CANVAS, 0.5, least=16),
    ]
)
MASKS = {
    "mask_bigbird": (masks.bigbird(), 1024),
    "mask_per_head": (HEADS, 512),
    "mask_video": (VIDEO, 1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="nvidia-h200", help="folder of benchmarks/results (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(ROOT / "benchmarks" / "results" / options.gpu).items():
        pictures.save(figure, options.out / (name + FORMAT))
        print(options.out / (name + FORMAT))


def figures(results: Path) -> dict:
    """matplotlib Figures by name, of the rows in a folder of results."""
    attention, decode, fusion, models, tuning = (
        read_rows([results / name])
        for name in ("attention.json", "decode.json", "fusion.json", "models.json", "tuning/tuning.json")
    )
    found = {
        "attention_latency": pictures.latency_bars(attention_bars(Results(attention)), measured(attention)),
        "models_latency": pictures.latency_bars(model_bars(ModelResults(models)), measured(models)),
        "tuning_curves": pictures.tuning_curves(searches(tuning), measured(tuning)),
        "roofline": pictures.roofline(
            {**attention_points(Results([*attention, *decode])), **fusion_points(FusionResults(fusion))},
            BANDWIDTH,
            MATRIX_RATE,
            measured([*attention, *decode, *fusion]) + "; the roof is a large copy's and a large product's rate",
        ),
    }
    return found | {name: pictures.block_mask(mask, length) for name, (mask, length) in MASKS.items()}


def measured(rows: list[dict]) -> str:
    """GPU, driver, date and commits of some rows."""
    values = ({row[field] for row in rows} for field in ("gpu", "driver", "date", "commit"))
    gpu, driver, date, commit = (", ".join(sorted(some)) for some in values)
    return f"{gpu}, driver {driver}, {date}, commit {commit}"


def attention_bars(results: Results) -> dict[str, dict[str, float]]:
    """Microseconds by case and system of one shape, the best of FlexAttention's forms as one system."""
    bars = {}
    for case in (attention_case(*BAR_SHAPE, mask) for mask in BAR_MASKS):
        peers = results.peers(case, bounds=False)
        flex = best({system: us for system, us in peers.items() if system.startswith("flex")})
        times = {"stof": results.us(case, "stof"), "FlexAttention": flex and flex[1]}
        times |= {"FlashAttention-4": peers.get("fa4"), "SDPA, mask": peers.get("sdpa-mask")}
        bars[f"{case.label}, {results.densities[case]:.0%} kept"] = _known(times)
    return bars


def model_bars(results: ModelResults) -> dict[str, dict[str, float]]:
    """Microseconds of a forward by model and system."""
    bars = {}
    for case in results.cases():
        times = {"stof": results.us(case, "stof"), "eager": results.us(case, "eager")}
        times |= {shown: results.us(case, system) for system, shown in SYSTEMS.items()}
        bars[f"{case.model} {case.batch} × {case.q_len}, {case.mask}"] = _known(times)
    return bars


def searches(rows: list[dict]) -> dict[str, list]:
    """The curves of the full searches of a tuning benchmark."""
    return {
        f"{row['case']['model']} {row['case']['batch']} × {row['case']['q_len']}": row["curve"]
        for row in rows
        if row["variant"] == "stof" and "failed" not in row and not row.get("seed")
    }


def attention_points(results: Results) -> dict[str, list[tuple[float, float]]]:
    """(FLOP a byte, FLOP a second) of our kernels, useful arithmetic only, by kind of case."""
    points = {}
    for case in results.cases():
        us = results.us(case, "stof")
        if us is not None:
            flops = useful_tflops(case, results.densities[case], 1.0) * 1e6
            point = flops / bytes_moved(case, results.densities[case]), flops / us * 1e6
            points.setdefault(_kind(case), []).append(point)
    return points


def fusion_points(results: FusionResults) -> dict[str, list[tuple[float, float]]]:
    """The same of the fused products of `KERNELS`, not of two in one: the picture tells six kinds apart."""
    points = {}
    for case in results.cases():
        us = results.us(case, "stof")
        if us is not None and case.flops and not case.inner:
            kernel = KERNELS[results.rows[case, "stof"]["variant"].split()[0]]
            points.setdefault(kernel, []).append((case.flops / case.bytes_moved, case.flops / us * 1e6))
    return points


def _kind(case: Case) -> str:
    if case.bench == "decode":
        return "decoding"
    return "attention, heads of 64" if case.head_dim == 64 else "attention, heads of 80 to 128"


def _known(times: dict) -> dict[str, float]:
    return {system: us for system, us in times.items() if us is not None}


if __name__ == "__main__":
    main()
