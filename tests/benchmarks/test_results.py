"""Rows to tables: which peers count at a point, and whether requirements are met."""

import pytest

from benchmarks.peers.cases import GRID_MASKS, GRID_SHAPES, attention_case, attention_cases, decode_cases
from benchmarks.peers.published import PAPER_KERNEL_US
from benchmarks.peers.report import page, requirements_table
from benchmarks.peers.results import Results, floor_us, useful_tflops
from benchmarks.peers.systems import FLEX, systems_for
from benchmarks.peers.targets import lines

WINDOW = attention_case(8, 12, 4096, 64, "sliding_window")
STRIDED = WINDOW.with_mask("strided")


def named(results):
    return {f"{line.what} | {line.against}": line for line in lines(results)}


def find(results, *words):
    (line,) = [line for name, line in named(results).items() if all(word in name for word in words)]
    return line


def whole_grid(row, ours, peers):
    """Rows of every grid point: `ours` microseconds, and each system of `peers` at its own."""
    rows = []
    for shape in GRID_SHAPES:
        for mask in GRID_MASKS:
            case = attention_case(*shape, mask)
            density = 0.5 if mask == "causal" else 0.1
            rows.append(row(case, "stof", ours, density))
            rows += [row(case, system, us, density) for system, us in peers.items()]
    return rows


def test_peers_at_a_point_are_those_that_compute_the_mask_or_more(row):
    rows = [row(case, system, 10.0) for case in (WINDOW, STRIDED) for system in ("stof", "stof-x", "flex-tensor")]
    rows += [row(WINDOW.with_mask("none"), "fa2", 20.0), row(WINDOW.with_mask("none"), "fa4", 15.0)]
    rows += [row(WINDOW.with_mask("causal"), "fa2-causal", 12.0), row(WINDOW.with_mask("causal"), "sdpa-mask", 1.0)]
    results = Results(rows)
    assert results.peers(WINDOW) == {"flex-tensor": 10, "fa2 (dense)": 20, "fa4 (dense)": 15}
    assert results.peers(STRIDED) == results.peers(WINDOW) | {"fa2-causal (causal)": 12}
    assert results.peers(STRIDED, bounds=False) == {"flex-tensor": 10}


def test_wrong_and_failed_systems_do_not_count(row):
    rows = [
        row(WINDOW, "flex-tensor", 5.0, error=1e-2),
        row(WINDOW, "flex-analytic", 5.0, error=float("nan")),
        row(WINDOW, "cudnn", failed="why"),
        row(WINDOW, "sdpa-mask", 9.0, error=4e-4),
    ]
    assert Results(rows).peers(WINDOW) == {"sdpa-mask": 9}


def test_newest_row_of_a_case_and_system_wins_whatever_the_order(row):
    new, old = row(WINDOW, "stof", 5.0, date="2026-11-22"), row(WINDOW, "stof", 7.0)
    assert Results([new, old]).us(WINDOW, "stof") == Results([old, new]).us(WINDOW, "stof") == 5
    assert Results([old, row(WINDOW, "stof", 6.0)]).us(WINDOW, "stof") == 6


def test_flex_lines_take_the_best_of_four_and_the_tensor_on_triton(row):
    times = dict(zip(FLEX, (40.0, 30.0, 26.0, 39.0), strict=True))
    results = Results(whole_grid(row, 10.0, times))
    best, users = find(results, "best of its four"), find(results, "tensor mask_mod")
    # Six sparse masks at S >= 2048: six 12 × 64 shapes and three of 32 × 128.
    assert len(best.ratios) == 54 and not best.missing
    assert best.mean == pytest.approx(2.6) and best.verdict == "pass"
    assert users.mean == pytest.approx(4.0) and users.verdict == "pass"


def test_one_slow_point_misses_everywhere_but_not_the_mean(row):
    rows = whole_grid(row, 10.0, dict.fromkeys(FLEX, 40.0)) + [row(WINDOW, "stof", 35.0)]
    line = find(Results(rows), "best of its four")
    assert line.mean > 2.5 and line.worst == (WINDOW, pytest.approx(40 / 35)) and line.verdict == "miss"


@pytest.mark.parametrize("bad", [{"failed": "no"}, {"error": 1.0}])
def test_ours_failing_or_wrong_is_a_miss(row, bad):
    rows = whole_grid(row, 10.0, dict.fromkeys(FLEX, 40.0)) + [row(WINDOW, "stof", 1.0, **bad)]
    line = find(Results(rows), "best of its four")
    assert line.worst == (WINDOW, 0.0) and line.verdict == "miss"


def test_missing_points_make_a_line_incomplete_and_no_points_no_data(row):
    rows = [r for r in whole_grid(row, 10.0, dict.fromkeys(FLEX, 40.0)) if r["case"]["mask"] != "document"]
    rows += [row(attention_case(*shape, "document"), "stof", 10.0) for shape in GRID_SHAPES]
    line = find(Results(rows), "best of its four")
    assert line.verdict == "incomplete" and len(line.missing) == 9
    assert find(Results(rows), "decoding").verdict == "no data"


def test_short_inputs_are_held_against_dense_kernels_too(row):
    rows = whole_grid(row, 10.0, {"flex-tensor": 14.0})
    rows += [row(attention_case(*shape, "none"), "cudnn", 9.0, 1.0) for shape in GRID_SHAPES]
    results = Results(rows)
    assert find(results, "S ≤ 1024", "included").verdict == "miss"
    assert find(results, "S ≤ 1024", "computes the mask").verdict == "pass"


def test_published_kernel_part_blocks_and_decoding(row):
    rows = [row(case, "stof", us / 1.25) for case, us in PAPER_KERNEL_US.items()]
    rows += [row(attention_case(*s, "full_blocks"), "stof", 10.0) for s in ((8, 12, 4096, 64), (1, 32, 8192, 128))]
    rows += [row(attention_case(*s, "part_blocks"), "stof", 11.5) for s in ((8, 12, 4096, 64), (1, 32, 8192, 128))]
    for case in decode_cases():
        if case.mask == "none":
            rows.append(row(case, "fa2", 30.0, 1.0))
        else:
            rows += [row(case, "stof", 10.0), row(case, "flex-analytic", 16.0), row(case, "sdpa-mask", 50.0)]
    results = Results(rows)
    paper = find(results, "sparse masks", "paper's own")
    assert len(paper.ratios) == 12 and paper.worst[1] == pytest.approx(1.25) and paper.verdict == "pass"
    assert find(results, "part blocks").verdict == "miss"
    decode = find(results, "decoding")
    assert decode.worst[1] == pytest.approx(1.6) and decode.verdict == "pass" and len(decode.ratios) == 72


def test_long_contexts_are_held_against_the_fastest_kernels(row):
    rows = []
    for case in attention_cases("long"):
        rows += [row(case, "stof", 10.0), row(case, "cudnn-flex", 10.5), row(case, "fa4", 11.0)]
        rows += [row(case, "cudnn-bsa", 12.0)] if case.mask.startswith("random_tiles") else []
        rows += [row(case, "fastvideo", 11.5)] if "fastvideo" in systems_for(case) else []
    results = Results(rows)
    causal, masks = find(results, "causal, S ≥ 2048"), find(results, "documents, causal windows")
    assert causal.mean == masks.mean == pytest.approx(1.05) and causal.everywhere == masks.everywhere == 0.97
    assert {(case.dtype, case.head_dim) for case in causal.ratios} == {
        ("float16", 64), ("float16", 128), ("bfloat16", 128)
    }  # fmt: skip
    assert all(case.q_len >= 2048 for case in causal.ratios) and len(causal.ratios) == 10
    assert {case.mask for case in masks.ratios} == {
        "document", "prefix-1024", "video", "causal_window-4096", "causal_window-1024"
    }  # fmt: skip
    tiles = find(results, "whole blocks at random")
    assert {(case.dtype, tiles.ratios[case]) for case in tiles.ratios} == {("float16", 1.2), ("bfloat16", 1.15)}
    assert len(tiles.ratios) == 4 and tiles.verdict == "pass"
    video = next(case for case in masks.ratios if case.mask == "video")
    faster = find(Results([*rows, row(video, "fastvideo", 9.0)]), "documents, causal windows")
    assert faster.worst == (video, pytest.approx(0.9)) and faster.verdict == "miss"


def test_sparse_grid_is_held_against_interval_kernels_too(row):
    rows = whole_grid(row, 10.0, {**dict.fromkeys(FLEX, 40.0), "cudnn-flex": 10.2})
    line = find(Results(rows), "sparse masks of the grid")
    assert line.worst[1] == pytest.approx(1.02) and line.verdict == "miss" and len(line.ratios) == 54


def test_dtypes_other_than_float16_are_named_in_tables(row):
    case = next(case for case in attention_cases("long") if case.mask == "video")
    text = page("attention", Results([row(case, "stof", 20.0), row(case, "cudnn-bsa", 10.0)]), Results([]))
    assert "| 1,24,24576,128 | video bfloat16 |" in text and "| best | cudnn-bsa |" in text
    assert "- 0.50× 1,24,24576,128 video bfloat16: 20 against 10 of cudnn-bsa" in text


def test_rates_and_floor():
    # 4 * 64 FLOP for each of 0.5 * 4096² elements of 96 heads.
    assert useful_tflops(WINDOW, 0.5, 1000.0) == pytest.approx(206.158, rel=1e-4)
    assert floor_us(WINDOW, 0.01) == pytest.approx(4 * 96 * 4096 * 64 * 2 / 4.3e12 * 1e6)
    assert floor_us(WINDOW, 1.0) == pytest.approx(4 * 64 * 96 * 4096**2 / 790e12 * 1e6)


def test_page_prints_losses_wrong_results_failures_and_doubtful_kernels(row):
    rows = [
        row(WINDOW, "stof", 20.0, scheduled=0.2),
        row(WINDOW, "flex-tensor", 10.0),
        row(WINDOW, "flex-analytic", 1.0, error=1.0),
        row(WINDOW, "flashinfer-bsr", failed="ModuleNotFoundError: flashinfer"),
        row(WINDOW.with_mask("none"), "fa2", 40.0, 1.0, kernels=["cudnn_sm90_flash"]),
    ]
    text = page("attention", Results(rows), Results(rows))
    assert "- 0.50× 8,12,4096,64 sliding_window: 20 against 10 of flex-tensor" in text
    assert "- flex-analytic at 8,12,4096,64 sliding_window: error 1.00e+00" in text
    assert "- flashinfer-bsr, 1 cases (8,12,4096,64 sliding_window): ModuleNotFoundError: flashinfer" in text
    assert "fa2 at 8,12,4096,64 none **(not the kernel expected)**" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| 8,12,4096,64 | sliding_window |")]
    assert "| 10 (0.50) flex-tensor |" in line and "| 40 (2.00) |" in line and "| 2062 | 4123 | 261% |" in line


def test_requirements_table_has_a_verdict_a_line():
    table = requirements_table(Results([]))
    assert len(table) == 2 + len(lines(Results([]))) and all("**no data**" in line for line in table[2:])
