"""Rows of the video benchmark in words: a line each, and the page of one GPU."""

from benchmarks.video.cases import BLOCK, MILLION, OURS, STATIC, TILES, Case

PEAK = 989e12  # dense bfloat16 of an H100 or H200 SXM, as NVIDIA's data sheets have it, in FLOP/s


def is_right(row: dict) -> bool:
    """Whether the system ran and its error is within twice PyTorch's in half precision (NaN is not)."""
    return "failed" not in row and row["error"] <= 2 * row["half_error"]


def rates(row: dict) -> tuple[float, float | None]:
    """TFLOP/s of the pairs that the mask keeps, and of those that the system computes, where it is known."""
    case = Case.from_row(row)
    dense = 4 * case.head_dim * case.heads * case.length**2 / row["median_us"] / 1e6
    scheduled = row.get("scheduled")
    return dense * row["density"], None if scheduled is None else dense * scheduled


def extra_memory(row: dict) -> float | None:
    """Peak memory over that of q, k, v and the output, minus 1; None on the CPU."""
    return row["peak_bytes"] / row["touched_bytes"] - 1 if "peak_bytes" in row else None


def line(row: dict) -> str:
    """A row in a line."""
    case = Case.from_row(row)
    found = f"{case.label} {row['system']}: "
    if "failed" in row:
        return f"{found}failed, {row['failed'][:250]}"
    if not is_right(row):
        return f"{found}WRONG, {row['error']}, PyTorch {row['half_error']}"
    found += f"{row['median_us']:.1f} µs, density {row['density']:.4f}"
    if case.kind != BLOCK:
        useful, computed = rates(row)
        found += f", {useful:.0f} TFLOP/s useful ({useful * 1e12 / PEAK:.1%} of the peak)"
        found += "" if computed is None else f", {computed:.0f} computed ({computed * 1e12 / PEAK:.1%})"
    extra = extra_memory(row)
    return found + ("" if extra is None else f", memory q+k+v+o {extra:+.1%}")


def page(rows: list[dict]) -> str:
    """The tables of one GPU's rows."""
    right = [row for row in rows if is_right(row)]
    lines = ["# Video", "", "## Sliding tiles, bfloat16", ""]
    lines += _table("case", "tokens × heads", "canvas, tile, window", "density", "system", "µs", "useful TFLOP/s",
                    "of the peak", "computed TFLOP/s", "of the peak", "× ours")  # fmt: skip
    lines += [_attention(row, right) for row in _sorted(right, TILES)]
    lines += ["", "## Layers of Wan", "", *_table("case", "tokens", "layers", "density", "system", "µs", "× ours")]
    for row in _sorted(right, BLOCK):
        case = Case.from_row(row)
        cells = case.name, f"{case.length:,}", case.layers, f"{row['density']:.3f}", row["system"]
        lines.append(_cells(*cells, f"{row['median_us']:.0f}", _over(row, right)))
    lines += ["", "## A million tokens", ""]
    lines += _table("case", "tokens × heads", "system", "density", "µs", "useful TFLOP/s", "memory over q+k+v+o")
    for row in _sorted(right, MILLION):
        case, extra = Case.from_row(row), extra_memory(row)
        cells = case.name, f"{case.length:,} × {case.heads} on {case.kv_heads}", row["system"], f"{row['density']:.5f}"
        memory = "–" if extra is None else f"{extra:+.1%}"
        lines.append(_cells(*cells, f"{row['median_us']:.0f}", f"{rates(row)[0]:.0f}", memory))
    failed = [f"- {line(row)}" for row in rows if not is_right(row)]
    told = sorted({f"{row['gpu']}, driver {row['driver']}, {row['date']}, commit {row['commit']}" for row in rows})
    found = f"{STATIC} is given columns and distances; the others find them, in blocks of 128, or 256."
    words = [f"The peak is {PEAK / 1e12:.0f} TFLOP/s.  {found}"]
    return "\n".join([*lines, "", *words, "", *failed, *([""] if failed else []), *(f"{each}." for each in told), ""])


def _attention(row: dict, right: list[dict]) -> str:
    case, (useful, computed) = Case.from_row(row), rates(row)
    places = ", ".join("×".join(map(str, sizes)) for sizes in (case.canvas, case.tile, case.window))
    share = lambda rate: "–" if rate is None else f"{rate * 1e12 / PEAK:.1%}"
    return _cells(
        case.name, f"{case.length:,} × {case.heads}", places, f"{row['density']:.3f}", row["system"],
        f"{row['median_us']:.0f}", f"{useful:.0f}", share(useful), "–" if computed is None else f"{computed:.0f}",
        share(computed), _over(row, right),
    )  # fmt: skip


def _over(row: dict, right: list[dict]) -> str:
    """A peer's time over ours."""
    ours = [other for other in right if other["system"] == OURS and other["case"] == row["case"]]
    return f"{row['median_us'] / ours[0]['median_us']:.2f}" if ours and row["system"] != OURS else ""


def _sorted(rows: list[dict], kind: str) -> list[dict]:
    some = [row for row in rows if row["case"]["kind"] == kind]
    return sorted(some, key=lambda row: (-row["case"]["length"], row["case"]["name"], row["median_us"]))


def _table(*names: str) -> list[str]:
    return [_cells(*names), "|---" * len(names) + "|"]


def _cells(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"
