"""Tuning logs: round trips, MetaSchedule's own reader, several processes, damage."""

import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from stof_tvm.tuning.logs.log import CHECKSUMS, FAILURES, README, RECORDS, SCHEMES, WORKLOADS, TuningLog, arch_name
from tests.stof_tvm.tuning import logged
from tests.stof_tvm.tuning.logged import GPU, OTHER, PROBLEM, SPACE, TARGET, WORKLOAD, trace
from tir_kernels.errors import TuningLogError
from tir_kernels.target import parse_target
from tir_kernels.tuning.problem_json import problem_to_json
from tir_kernels.tuning.template_space import chosen
from tir_kernels.tuning.workload import fusion_workload, primfunc_workload, problem_of

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path):
    """A log of four trials: two times and a failure of one workload, one time of another."""
    log = TuningLog(tmp_path, TARGET)
    log.add(WORKLOAD, trace(0), 12.5, GPU)
    log.add(WORKLOAD, trace(1), 11.0, GPU)
    log.add(WORKLOAD, trace(2), "it hung", GPU)
    log.add(OTHER, trace(0, OTHER), 7.0, "NVIDIA A100")
    return tmp_path / "sm_80"


def test_records_round_trip(folder):
    log = TuningLog(folder.parent, TARGET)
    times = [(record.us, record.gpu, record.reason) for record in log.records(WORKLOAD)]
    assert times == [(12.5, GPU, ""), (pytest.approx(11.0), GPU, ""), (None, GPU, "it hung")]
    assert [record.decisions for record in log.records(WORKLOAD)] == [
        SPACE.decisions_for(config) for config in SPACE.configs[:3]
    ]
    best = log.best(WORKLOAD)
    assert best.us == pytest.approx(11.0) and best.location == f"sm_80/{RECORDS}:2"
    sch = Schedule(WORKLOAD)
    Trace.apply_json_to_schedule(best.trace, sch)
    assert chosen(sch) == (SPACE.template, SPACE.configs[1])
    assert log.records(OTHER)[0].gpu == "NVIDIA A100"
    assert [problem_of(mod) for _, mod in log.workloads()][0] == PROBLEM


def test_problems_are_looked_up_without_their_workloads(folder):
    """Also of workloads that this or another process adds, once they are read."""
    texts = [problem_to_json(replace(PROBLEM, m=m)) for m in (64, 32, 16, 8)]
    log = TuningLog(folder.parent, TARGET)
    assert list(map(log.may_hold, texts)) == [True, True, False, False]
    log.add(fusion_workload(replace(PROBLEM, m=16)), trace(), 7.0, GPU)
    TuningLog(folder.parent, TARGET).add(fusion_workload(replace(PROBLEM, m=8)), trace(), 7.0, GPU)
    assert list(map(log.may_hold, texts)) == [True, True, True, False]
    log.refresh()
    assert list(map(log.may_hold, texts)) == [True] * 4
    assert not TuningLog(folder.parent / "none", TARGET).may_hold(texts[0])


OTHER_TEXT = rb'12345678{"stof.problem": 3, "type":"ffi.String","data":"{}"}'


@pytest.mark.parametrize(
    "module", ["no base64!", *(base64.b64encode(x).decode() for x in (b'12345678{"stof.problem": 3}', OTHER_TEXT))]
)
def test_a_workload_of_another_form_may_be_of_any_problem(tmp_path, module):
    folder = tmp_path / "sm_80"
    folder.mkdir()
    (folder / WORKLOADS).write_text(json.dumps(["1", module]) + "\n")
    assert TuningLog(tmp_path, TARGET).may_hold(problem_to_json(PROBLEM))


def test_functions_that_no_template_computes_are_of_no_problem(folder):
    log = TuningLog(folder.parent, TARGET)
    workload = primfunc_workload(OTHER["main"].without_attr("stof.problem"))
    log.add(workload, trace(), 7.0, GPU)
    assert len(log.keys) == 3 and not log.may_hold(problem_to_json(replace(PROBLEM, m=16)))


def test_every_problem_of_the_committed_logs_is_found():
    log = TuningLog(ROOT / "tuning_logs", TARGET)
    problems = [problem_of(mod) for _, mod in list(log.workloads())[::8]]
    assert len(problems) > 10 and all(log.may_hold(problem_to_json(x)) for x in problems if x is not None)


def test_added_records_are_those_that_are_read(folder):
    log = TuningLog(folder.parent, TARGET)
    added = [log.add(WORKLOAD, trace(3), 10.0, GPU), log.add(WORKLOAD, trace(3), "wrong numbers", GPU)]
    assert TuningLog(folder.parent, TARGET).records(WORKLOAD)[2:3] == added[:1]
    assert TuningLog(folder.parent, TARGET).records(WORKLOAD)[-1] == added[1]


def test_a_gpu_s_own_records_go_first(folder):
    log = TuningLog(folder.parent, TARGET)
    log.add(WORKLOAD, trace(0), 99.0, "NVIDIA A100")
    assert log.best(WORKLOAD, "NVIDIA A100").us == pytest.approx(99.0)
    assert log.best(WORKLOAD, "NVIDIA L4").us == pytest.approx(11.0)


def test_metaschedule_reads_the_files(folder):
    database = ms.database.JSONDatabase(work_dir=str(folder))
    assert len(database) == 3
    best = database.query_tuning_record(WORKLOAD, TARGET, "main")
    assert float(best.run_secs[0]) == pytest.approx(11e-6)
    assert chosen(best.trace) == (SPACE.template, SPACE.configs[1])
    assert str(best.target.attrs["model"]) == GPU


def test_records_of_metaschedule_s_own_are_read(tmp_path):
    (tmp_path / "sm_80").mkdir()
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "sm_80"))
    workload = database.commit_workload(WORKLOAD)
    for number, seconds in ((0, [2e-6, 4e-6]), (1, [1e10])):
        database.commit_tuning_record(ms.database.TuningRecord(trace(number), workload, seconds, TARGET, None))
    timed, failed = TuningLog(tmp_path, TARGET).records(WORKLOAD)
    assert timed.us == pytest.approx(3.0) and timed.gpu == ""
    assert not failed.valid and failed.reason == "no time was measured"


def test_nothing_is_written_by_reading(tmp_path):
    log = TuningLog(tmp_path / "none", TARGET)
    assert log.records(WORKLOAD) == [] and log.best(WORKLOAD) is None and log.scheme("a") is None
    assert not (tmp_path / "none").exists()


def test_readme_of_the_first_record(folder):
    text = (folder / README).read_text()
    assert "sm_80" in text and GPU in text and "Command: `" in text
    (folder / README).write_text("mine")
    TuningLog(folder.parent, TARGET).add(WORKLOAD, trace(3), 9.0, GPU)
    assert (folder / README).read_text() == "mine"


def test_schemes(folder):
    log, other = TuningLog(folder.parent, TARGET), TuningLog(folder.parent, TARGET)
    log.save_scheme("graph", "0x4f", 99.5, GPU)
    other.save_scheme("another", "0x3", 1.0, GPU, "2026-01-31")
    log.refresh()
    assert set(log.schemes) == {"graph", "another"}
    record = other.scheme("graph")
    assert (record.scheme, record.us, record.gpu) == ("0x4f", 99.5, GPU)
    assert other.scheme("another").date == "2026-01-31"


def test_two_processes_add_at_once(tmp_path):
    command = [sys.executable, "-m", logged.__name__, str(tmp_path)]
    processes = [subprocess.Popen([*command, f"GPU {i}", "30"], cwd=ROOT) for i in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    log = TuningLog(tmp_path, TARGET)
    keys = [key for key, _ in log.workloads()]
    assert len(keys) == 30
    for number, key in enumerate(keys):
        records = log.records(key)
        assert sorted(record.gpu for record in records) == ["GPU 0", "GPU 1"]
        problem = problem_of(dict(log.workloads())[key]) if number == 0 else None
        assert problem is None or all(record.us == pytest.approx(problem.m / 8) for record in records)
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path / "sm_80"))) == 60


def test_a_process_sees_what_another_added(folder):
    log, other = TuningLog(folder.parent, TARGET), TuningLog(folder.parent, TARGET)
    other.add(WORKLOAD, trace(3), 1.0, GPU)
    assert log.best(WORKLOAD).us == pytest.approx(11.0)
    log.refresh()
    assert log.best(WORKLOAD).us == pytest.approx(1.0)


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS, FAILURES])
def test_a_killed_writer_costs_its_own_line_only(folder, name):
    path = folder / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + lines[0][:20])
    with pytest.warns(UserWarning, match=f"{name}, line {len(lines) + 1} is not whole"):
        log = TuningLog(folder.parent, TARGET)
    assert path.read_bytes() == b"".join(lines)
    assert len(log.records(WORKLOAD)) == 3
    log.add(WORKLOAD, trace(3), 10.0, GPU)
    assert len(TuningLog(folder.parent, TARGET).records(WORKLOAD)) == 4


@pytest.mark.parametrize(
    "name, line",
    [
        (WORKLOADS, b'["1"]'),
        (WORKLOADS, b'"12"'),
        (RECORDS, b"[9, [[[], []], [1.0], {}, []]]"),
        (RECORDS, b"[-1, [[[], []], [1.0], {}, []]]"),
        (RECORDS, b"[true, [[[], []], [1.0], {}, []]]"),
        (RECORDS, b"[0, [[[], []], [], {}, []]]"),
        (RECORDS, b"[0, [[[], []], [NaN], {}, []]]"),
        (RECORDS, b"[0, [[[], []], [-1.0], {}, []]]"),
        (RECORDS, b"[0, [[[], []], [1" + b"0" * 400 + b"], {}, []]]"),
        (RECORDS, b'[0, [[[], []], [1.0], {"model": 3}, []]]'),
        (RECORDS, b'[0, [[[["Annotate", [0, "[2]"], ["stof.template"], []]], []], [1.0], {}, []]]'),
        (RECORDS, b"[0, 5]"),
        (RECORDS, b'{"a": 1'),
        (RECORDS, b"[" * 100_000 + b"]" * 100_000),
        (FAILURES, b'{"workload": "1"}'),
        (FAILURES, b'{"workload": "1", "decisions": 3, "gpu": "", "reason": ""}'),
        (FAILURES, b'{"workload": [], "decisions": {"trace": ""}, "gpu": "", "reason": ""}'),
    ],
)
def test_other_damage_names_file_and_line(folder, name, line):
    (folder / CHECKSUMS).unlink()  # which would tell of all of these
    first, *rest = (folder / name).read_bytes().splitlines()
    (folder / name).write_bytes(b"\n".join([first, line, *rest, b""]))
    with pytest.raises(TuningLogError, match=rf"sm_80/{name}, line 2 is damaged"):
        TuningLog(folder.parent, TARGET)


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS, FAILURES])
def test_a_flipped_bit_is_damage(folder, name):
    """Even where the line still says something: another time, another choice."""
    data = bytearray((folder / name).read_bytes())
    for location in range(3, data.index(b"\n"), 97):
        flipped = data.copy()
        flipped[location] ^= 1
        (folder / name).write_bytes(flipped)
        with pytest.raises(TuningLogError, match=rf"sm_80/{name}, line 1 is damaged: {CHECKSUMS} does not"):
            TuningLog(folder.parent, TARGET)


def test_a_workload_at_another_place_is_damage(folder):
    """Records of one would count as another's."""
    lines = (folder / WORKLOADS).read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], lines[::-1], [lines[0], lines[0], lines[1]]):
        (folder / WORKLOADS).write_bytes(b"".join(changed))
        with pytest.raises(TuningLogError, match=f"{WORKLOADS}, line . is damaged"):
            TuningLog(folder.parent, TARGET)


def test_lines_of_other_programs_get_checksums_with_the_first_record(folder):
    (folder / CHECKSUMS).unlink()
    log = TuningLog(folder.parent, TARGET)
    assert not (folder / CHECKSUMS).exists() and len(log.records(WORKLOAD)) == 3
    log.add(WORKLOAD, trace(3), 10.0, GPU)
    assert len(TuningLog(folder.parent, TARGET).records(WORKLOAD)) == 4
    assert len((folder / CHECKSUMS).read_text().splitlines()) == 2 + 4 + 1


def test_what_could_not_be_read_back_is_not_written(folder):
    before = (folder / RECORDS).read_bytes()
    with pytest.raises(ValueError, match="nan"):
        TuningLog(folder.parent, TARGET).add(WORKLOAD, trace(3), float("nan"), GPU)
    assert (folder / RECORDS).read_bytes() == before


def test_a_damaged_module_names_file_and_line(folder):
    (folder / CHECKSUMS).unlink()
    lines = (folder / WORKLOADS).read_text().splitlines()
    key, _ = json.loads(lines[1])
    (folder / WORKLOADS).write_text("\n".join([lines[0], json.dumps([key, "bm90IGEgbW9kdWxl"]), ""]))
    with pytest.raises(TuningLogError, match=f"{WORKLOADS}, line 2 is damaged"):
        list(TuningLog(folder.parent, TARGET).workloads())


def test_each_gpu_has_its_scheme(folder):
    log = TuningLog(folder.parent, TARGET)
    for gpu, scheme, us in ((GPU, "0x4f", 20.0), ("NVIDIA A100", "0x4e", 30.0), (GPU, "0x4d", 19.0)):
        log.save_scheme("graph", scheme, us, gpu)
    read = TuningLog(folder.parent, TARGET)
    assert [read.scheme("graph", gpu).scheme for gpu in (GPU, "NVIDIA A100", "NVIDIA L4", None)] == [
        *("0x4d", "0x4e", "0x4d", "0x4d")
    ]
    assert read.schemes == log.schemes and len(read.schemes["graph"]) == 2


SCHEME = {"scheme": "0x3", "us": 1.0, "gpu": "", "date": "2026-01-31"}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {\n"scheme" "0x3"}}',
        '{"a": {"colour": 3}}',
        "[1]",
        *(
            json.dumps({"a": SCHEME | wrong})
            for wrong in ({"scheme": 3}, {"scheme": "0xg"}, {"us": -1}, {"date": "now"})
        ),
        json.dumps({"a": [SCHEME, 3]}),
        '{"a": [], "a": []}',
        b"\xff",
        "[" * 100_000,
    ],
)
def test_damaged_schemes_name_the_file(folder, text):
    (folder / SCHEMES).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TuningLogError, match=SCHEMES + (", line 2" if "\n" in str(text) else "")):
        TuningLog(folder.parent, TARGET)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningLogError, match="cannot be written"):
        TuningLog(tmp_path / "file", TARGET).add(WORKLOAD, trace(), 1.0, GPU)


def test_folders_of_architectures():
    assert arch_name(TARGET) == "sm_80"
    assert arch_name(parse_target("cuda -arch=sm_90a")) == "sm_90a"
    assert arch_name(parse_target({"kind": "llvm", "mcpu": "znver4"})) == "llvm-znver4"


def test_a_slower_scheme_does_not_replace_a_faster_one(tmp_path):
    log = TuningLog(tmp_path, TARGET)
    log.save_scheme("graph", "0x1", 10.0, "a GPU")
    log.save_scheme("graph", "0x2", 11.0, "a GPU")
    assert log.scheme("graph").scheme == TuningLog(tmp_path, TARGET).scheme("graph").scheme == "0x1"
    log.save_scheme("graph", "0x3", 9.0, "a GPU")
    assert TuningLog(tmp_path, TARGET).scheme("graph").scheme == "0x3"
