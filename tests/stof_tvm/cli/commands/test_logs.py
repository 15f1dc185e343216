"""`stof logs`: list, verify, merge and export."""

import json
import re
import shutil

import pytest

from stof_tvm.cli import main
from stof_tvm.tuning.logs.log import CHECKSUMS, README, RECORDS, TuningLog
from tests.stof_tvm.cli import documented
from tests.stof_tvm.tuning.logged import GPU, OTHER, PROBLEM, SPACE, TARGET, WORKLOAD, trace
from tir_kernels.tuning.workload import primfunc_workload

A100 = "NVIDIA A100"


@pytest.fixture
def folder(tmp_path):
    log = TuningLog(tmp_path / "one", TARGET)
    for number, us in enumerate((12.5, 11.0, 13.5, 14.0)):
        log.add(WORKLOAD, trace(number % len(SPACE.configs)), us + number, GPU)
    log.add(WORKLOAD, trace(0), 99.0, A100)
    log.add(WORKLOAD, trace(1), "it hung", GPU)
    log.save_scheme("graph", "0x4f", 100.0, GPU, "2026-01-31")
    return tmp_path / "one"


@pytest.fixture
def other(tmp_path):
    log = TuningLog(tmp_path / "two", TARGET)
    log.add(WORKLOAD, trace(2), 8.0, GPU)
    log.add(OTHER, trace(0, OTHER), 7.0, GPU)
    log.save_scheme("graph", "0x4e", 90.0, GPU, "2026-02-28")
    return tmp_path / "two"


def run(capsys, *arguments):
    """Exit code and the JSON object that a command prints."""
    code = main(["logs", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def damage_a_choice(folder):
    """Record a template that does not exist."""
    replace_in_records(folder, "cuda row-chain", "cuda row-dance", 1)


def replace_in_records(folder, *replacement):
    """As another version would have written them: with no checksums that do not fit."""
    path = folder / "sm_80" / RECORDS
    path.write_text(path.read_text().replace(*replacement))
    (folder / "sm_80" / CHECKSUMS).unlink()


def test_examples_run(folder, other, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a/tuning_logs", "b", "work"):
        shutil.copytree(folder if name == "work" else other, name)
    for name in ("export", "merge", "list"):  # merge writes what list reads; verify runs below
        with pytest.raises(SystemExit):
            main(["logs", name, "--help"])
        (example,) = re.findall(r"^example: stof logs (.+)$", capsys.readouterr().out, re.M)
        code, found = run(capsys, *example.split())
        assert code == 0 and found.keys() <= documented.fields(f"logs {name}")
        if name == "export":
            shutil.rmtree("tuning_logs")


def test_list(folder, capsys):
    code, found = run(capsys, "list", folder)
    (row,), (scheme,) = found["workloads"], found["schemes"]
    assert code == 0
    assert row["arch"] == "sm_80" and row["problem"] == str(PROBLEM) and row["gpu"] == GPU
    assert (row["trials"], row["failed"], row["best_us"]) == (6, 1, pytest.approx(12.0))
    assert row["decisions"] == SPACE.decisions_for(SPACE.configs[1])
    assert scheme["scheme"] == "0x4f" and scheme["graph"] == "graph"
    assert main(["logs", "list", str(folder)]) == 0
    text = capsys.readouterr().out
    assert f"sm_80  {row['name']}  12.00 µs on NVIDIA H200  6 trials, 1 failed  {SPACE.configs[1].label}\n" in text
    assert "scheme 0x4f, 100.0 µs" in text


def test_verify_rebuilds_every_record(folder, capsys):
    assert run(capsys, "verify", folder) == (0, {"misfits": []})
    damage_a_choice(folder)
    code, found = run(capsys, "verify", folder)
    (row,) = found["misfits"]
    assert found.keys() <= documented.fields("logs verify")
    assert code == 1 and row["location"] == f"sm_80/{RECORDS}:1" and "no template 'cuda row-dance'" in row["reason"]
    assert main(["logs", "verify", str(folder)]) == 1
    assert "1 records no longer fit" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_in_several_processes(folder, capsys):
    damage_a_choice(folder)
    alone = run(capsys, "verify", folder)
    assert run(capsys, "verify", folder, "--jobs", 2) == alone


def test_verify_applies_traces_of_other_rules(tmp_path, capsys):
    from tvm.s_tir import Schedule

    workload = primfunc_workload(WORKLOAD["main"].without_attr("stof.problem"))
    sch = Schedule(workload)
    sch.parallel(sch.get_loops(sch.get_sblock("out"))[0])
    TuningLog(tmp_path, TARGET).add(workload, sch.trace, 5.0, GPU)
    assert run(capsys, "verify", tmp_path)[0] == 0
    _, listed = run(capsys, "list", tmp_path)
    assert listed["workloads"][0]["problem"] == "function of float16[64, 64], float16[64, 64]"
    replace_in_records(tmp_path, '"out"', '"no_such_block"')
    assert run(capsys, "verify", tmp_path)[0] == 1


def test_merge_keeps_the_best_of_each_gpu(folder, other, tmp_path, capsys):
    code, found = run(capsys, "merge", folder, other, "--to", tmp_path / "both")
    assert code == 0 and found["records"] == 3
    log = TuningLog(tmp_path / "both", TARGET)
    assert [(record.us, record.gpu) for record in log.ranked(WORKLOAD)] == [(pytest.approx(8.0), GPU), (99.0, A100)]
    assert log.best(WORKLOAD).decisions == SPACE.decisions_for(SPACE.configs[2])
    assert log.best(OTHER).us == pytest.approx(7.0)
    assert (log.scheme("graph").scheme, log.scheme("graph").date) == ("0x4e", "2026-02-28")
    assert "First record" in (log.folder / README).read_text()


def test_export_spreads_records_from_the_fastest_to_the_slowest(folder, tmp_path, capsys):
    code, found = run(capsys, "export", folder, "--to", tmp_path / "few", "--records", 3)
    assert code == 0 and found["records"] == 4
    log = TuningLog(tmp_path / "few", TARGET)
    times = [round(record.us, 6) for record in log.ranked(WORKLOAD) if record.gpu == GPU]
    assert times == [12.0, 12.5, 17.0]
    assert all(record.valid for record in log.records(WORKLOAD))


def test_what_is_refused(folder, tmp_path, capsys):
    assert main(["logs", "list", str(tmp_path / "missing")]) == 1
    assert "missing is no folder" in capsys.readouterr().err
    (tmp_path / "elsewhere" / "photos").mkdir(parents=True)
    assert main(["logs", "list", str(tmp_path / "elsewhere")]) == 1
    assert "elsewhere holds no tuning logs" in capsys.readouterr().err
    assert main(["logs", "merge", str(folder), "--to", str(folder)]) == 1
    assert "is not empty" in capsys.readouterr().err
    (folder / "sm_80" / RECORDS).write_text("[\n[0]\n")
    assert main(["logs", "verify", str(folder)]) == 1
    assert "database_tuning_record.json, line 1 is damaged" in capsys.readouterr().err
    for wrong in (["logs", "lst"], ["logs", "export", "a", "--to", "b", "--records", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
