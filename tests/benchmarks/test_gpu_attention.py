"""The measuring command: its plan, its worker processes, a dry run, and the merged files."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import gpu_attention
from benchmarks.peers import pool
from benchmarks.peers.cases import Case, attention_case, attention_cases, decode_cases, tiny
from benchmarks.peers.systems import ALL, CUDNN, FA4_GROUP, FASTVIDEO, GROUPS, systems_for

SCRIPT = Path(gpu_attention.__file__)
CASE = attention_case(1, 12, 128, 64, "causal")
FOLDERS = ["--fa4-path", "x", "--cudnn-path", "y", "--fastvideo-path", "z"]


def test_grid_is_the_whole_grid():
    cases = attention_cases("grid")
    assert sum(case.mask in ("causal", "document") for case in cases) == 2 * (3 * 6 + 3)
    cases = attention_cases()
    assert len(decode_cases()) == 2 * 3 * 4 * 4
    assert {system for case in cases for system in systems_for(case)} == set(ALL)
    for case in cases + decode_cases():
        assert Case.from_row({"bench": case.bench, "case": case.to_json(0.5)}) == case


def test_long_cases_are_a_set_of_their_own():
    grid, long, both = (attention_cases(name) for name in ("grid", "long", "all"))
    assert len(both) == len(set(grid) | set(long)) and set(both) == set(grid) | set(long)
    assert {case.label for case in set(grid) & set(long)} == {
        "1,32,4096,128 causal", "1,32,8192,128 causal", "8,12,2048,64 causal", "8,12,4096,64 causal",
        "1,32,16384,128 document",
    }  # fmt: skip
    assert {case.dtype for case in long} == {"float16", "bfloat16"} and {case.head_dim for case in long} >= {80, 96}
    assert "1,32/8,8192,128 causal bfloat16" in {case.label for case in long}
    tiles = {case for case in long if case.mask.startswith("random_tiles")}
    assert {case.dtype for case in tiles} == {"float16", "bfloat16"} and len(tiles) == 2 * 3
    assert len({case.label for case in both}) == len(both)
    plan = gpu_attention.make_plan(gpu_attention.parse_arguments(["--set", "long", *FOLDERS]))
    assert [case for case, _ in plan] == long


def test_parts_divide_the_cases_and_keep_shapes_together():
    parts = [gpu_attention.make_plan(gpu_attention.parse_arguments(["--part", f"{k}/3", *FOLDERS])) for k in (1, 2, 3)]
    whole = gpu_attention.make_plan(gpu_attention.parse_arguments(FOLDERS))
    assert sorted(work for part in parts for work in part) == sorted(whole)
    shapes = [{case.shape for case, _ in part} for part in parts]
    assert not shapes[0] & shapes[1] and not shapes[1] & shapes[2] and not shapes[0] & shapes[2]


def test_each_system_is_in_one_group():
    assert sorted(name for members in GROUPS.values() for name in members) == sorted(ALL)
    assert set(gpu_attention.group_sizes(gpu_attention.parse_arguments(FOLDERS), 16)) == set(GROUPS)


def test_systems_that_need_flash_attention_4_are_apart_or_left_out(capsys):
    plan = gpu_attention.make_plan(gpu_attention.parse_arguments(FOLDERS))
    groups = gpu_attention.split(plan)
    assert {s for _, systems in groups["fa4"] for s in systems} == set(FA4_GROUP)
    assert {s for _, systems in groups["fastvideo"] for s in systems} == set(FASTVIDEO)
    assert not {s for _, systems in groups["main"] for s in systems} & {*FA4_GROUP, *FASTVIDEO}
    without = gpu_attention.make_plan(gpu_attention.parse_arguments([]))
    assert not {s for _, systems in without for s in systems} & {*FA4_GROUP, *FASTVIDEO}
    without = gpu_attention.make_plan(gpu_attention.parse_arguments(["--fa4-path", "x"]))
    assert {s for _, systems in without for s in systems} & set(FA4_GROUP) == set(FA4_GROUP) - set(CUDNN)
    gpu_attention.print_plan(without, gpu_attention.parse_arguments(["--fa4-path", "x"]))
    told = capsys.readouterr().out
    assert f"without --cudnn-path: {', '.join(CUDNN)}\n" in told and "without --fastvideo-path: fastvideo\n" in told


def test_folders_come_first_for_the_processes_that_need_them():
    folders = gpu_attention.fa4_folders(gpu_attention.parse_arguments(FOLDERS))
    assert folders == ["x", "x/nvidia_cutlass_dsl/dsl_packages", "y"]
    assert gpu_attention.fa4_folders(gpu_attention.parse_arguments([])) == []
    assert gpu_attention.fastvideo_folders(gpu_attention.parse_arguments(FOLDERS)) == ["z"]


@pytest.mark.parametrize("arguments", [["--part", "3/2"], ["--part", "1"], ["--peers", "fa9"], ["--cudnn-path", "x"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        gpu_attention.parse_arguments(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_tiny_cases_keep_what_distinguishes_them():
    gqa = [case for case in decode_cases() if case.kv_heads == 8]
    assert all(tiny(case).heads == 2 * tiny(case).kv_heads and tiny(case).q_len == 1 for case in gqa)
    assert {tiny(case).mask for case in attention_cases()} == {case.mask for case in attention_cases()}


class FakeWorker:
    """Stands for a worker process: ends at the system "dies", loses its context at "breaks", else answers a row."""

    started = 0

    def __init__(self, device, python_path, log):
        type(self).started += 1
        self.connection, self.theirs = pool.Pipe()

    def send(self, command, work):
        def run():
            case, systems = work
            for system in systems if command == "time" else ():
                if system == "dies":
                    break
                self.theirs.send(("row", {"case": case.to_json(0.5), "system": system, "median_us": 1.0}))
                if system == "breaks":
                    self.theirs.send(("broken", None))
                    break
            else:
                self.theirs.send(("done", None))
            if "dies" in systems or "breaks" in systems:
                self.theirs.close()

        threading.Thread(target=run).start()

    answers = pool.WorkerProcess.answers

    def _ending(self):
        return "its process ended with status 1"

    def end(self):
        self.connection.close()


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(pool, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(FakeWorker, "started", 0)
    return pool.Pool({"main": pool.Group(2)}, "cpu", sys.stderr)


def test_cases_are_timed_by_the_process_that_prepared_them(workers):
    cases = [CASE, CASE.with_mask("none"), CASE.with_mask("strided")]
    workers.prepare({"main": [(case, ("stof",)) for case in cases]}, deadline=float("inf"))
    assert FakeWorker.started == 2 and {case for _, case in workers.owner} == set(cases)
    rows = []
    for case in cases:
        workers.time("main", (case, ("stof", "fa2")), rows.append)
    assert [row["system"] for row in rows] == ["stof", "fa2"] * 3 and FakeWorker.started == 2


def test_system_that_ends_its_process_fails_and_the_others_run_in_a_new_one(workers):
    rows = []
    workers.time("main", (CASE, ("stof", "dies", "fa2")), rows.append)
    assert [row["system"] for row in rows] == ["stof", "dies", "fa2"]
    assert [row.get("failed") for row in rows] == [None, "its process ended with status 1", None]
    assert FakeWorker.started == 2


def test_system_that_breaks_the_context_has_reported_itself(workers):
    rows = []
    workers.time("main", (CASE, ("breaks", "fa2")), rows.append)
    assert [(row["system"], row.get("failed")) for row in rows] == [("breaks", None), ("fa2", None)]


def test_environment_that_keeps_losing_workers_is_given_up(workers):
    work = [(CASE.with_mask(f"sliding_window-{n}"), ("dies",)) for n in range(1, 30)]
    workers.prepare({"main": [(case, ("dies",)) for case, _ in work[:2]]}, deadline=float("inf"))
    rows = []
    for item in work:
        workers.time("main", item, rows.append)
    assert len(rows) == len(work) and FakeWorker.started <= pool.MAX_LOSSES + 2
    assert "were lost" in rows[-1]["failed"]


def test_dry_run_goes_the_whole_way(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--workers", "1", "--out", str(out)]
    labels = ["1,12,128,64 none", "1,12,128,64 bigbird", "random_tiles-0.25", "video"]
    command += ["--only", *labels, "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
    measured = json.loads(out.read_text())
    assert {row["case"]["mask"] for row in measured} == {"none", "bigbird", "random_tiles-0.25", "video"}
    assert {row["case"]["dtype"] for row in measured if row["case"]["mask"] == "video"} == {"bfloat16", "float16"}
    rows = {row["system"]: row for row in measured}
    for system in ("stof", "sdpa-mask", "flex-tensor", "flex-analytic", "fa2"):
        assert "failed" not in rows[system], rows[system]
        assert rows[system]["error"] <= 2 * rows[system]["half_error"] and rows[system]["wall_us"] > 0
    assert "scaled_dot_product_flash_attention" in rows["fa2"]["variant"]
    assert "No viable backend" in rows["cudnn"]["failed"]
    assert len({row["run"] for row in rows.values()}) == 1


def test_merge_writes_rows_and_page_of_each_benchmark(tmp_path, row, capsys):
    decode = decode_cases()[1]
    files = {
        "a.json": [row(CASE, "stof", 9.0), row(CASE, "sdpa-mask", 12.0)],
        "b.json": [row(CASE, "stof", 8.0), row(decode, "stof", 5.0), row(decode, "flex-tensor", 20.0)],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps(rows))
    assert gpu_attention.merge([tmp_path / name for name in files], tmp_path / "results") == 0
    folder = tmp_path / "results" / "nvidia-h200"
    merged = json.loads((folder / "attention.json").read_text())
    assert sorted((r["system"], r["median_us"]) for r in merged) == [("sdpa-mask", 12), ("stof", 8)]
    assert "12 (1.50)" in (folder / "attention.md").read_text()
    assert "20 (4.00)" in (folder / "decode.md").read_text()
    # Decoding is among the requirements even when only the grid is merged again.
    gpu_attention.merge([tmp_path / "a.json"], tmp_path / "results")
    page = (folder / "attention.md").read_text()
    assert "1 of 72 | 4.00×" in page and "12 (1.33)" in page


def test_measuring_without_a_file_replaces_published_rows(tmp_path, row, monkeypatch):
    rows = tmp_path / "measured.json"
    monkeypatch.setattr(gpu_attention, "ROWS", rows)
    monkeypatch.setattr(gpu_attention, "need_gpu", lambda options: None)
    monkeypatch.setattr(sys, "argv", ["gpu_attention.py", "--results", str(tmp_path / "results"), "--only", CASE.label])
    for us in (9.0, 8.0):
        measured = [row(CASE, "stof", us), *([row(CASE, "sdpa-mask", 12.0)] if us == 9.0 else [])]
        monkeypatch.setattr(gpu_attention, "measure", lambda *_, rows=rows: rows.write_text(json.dumps(measured)) and 0)
        assert gpu_attention.main() == 0
    published = json.loads((tmp_path / "results" / "nvidia-h200" / "attention.json").read_text())
    assert sorted((r["system"], r["median_us"]) for r in published) == [("sdpa-mask", 12), ("stof", 8)]


def test_processes_without_tvm_can_serve_flash_attention_4():
    program = (
        "import sys, benchmarks.peers.worker, benchmarks.peers.flex, benchmarks.peers.fa4, "
        "benchmarks.peers.cudnn_flex, benchmarks.peers.cudnn_bsa, benchmarks.peers.fastvideo; "
        "print('tvm' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1]).stdout == "False\n"


@pytest.mark.parametrize(
    "call_us, sets, launches", [(5, 64, 256), (5, 1, 256), (60, 10, 40), (9000, 1, 1), (9000, 3, 3)]
)
def test_graphs_hold_whole_rounds_of_the_input_sets(call_us, sets, launches):
    from benchmarks.peers.timing import _launches

    assert _launches(call_us, sets) == launches


def test_lack_of_memory_while_compiling_is_not_final(monkeypatch):
    import torch

    from benchmarks.peers import worker

    answers = [torch.OutOfMemoryError("out of memory"), worker.Prepared(lambda q, k, v: q, "some")]

    def prepare(system, case, pattern, device):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(worker, "prepare", prepare)
    process, case = worker.Worker("cpu"), tiny(CASE)
    assert list(process.prepare(case, ("fa2",))) == [] and not process.prepared
    ((_, row),) = process.time(case, ("fa2",))
    assert "failed" not in row and row["median_us"] > 0
    # This "system" returns q, which is no attention.
    assert row["error"] > 2 * row["half_error"]
