"""What the counters benchmark reads out of ncu's output; reading the counters themselves needs a GPU."""

from benchmarks.gpu_counters import CASES, parse_case, read_launches, stalls, table

OUTPUT = """==PROF== Connected to process 7
case ["8,12,4096,64 causal", "block-wise", 0.5]
"ID","Kernel Name","gpu__time_duration.sum","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","x"
"","","us","inst",""
"0","attention_kernel","1,234.5","0.25","n/a"
"1","attention_kernel","2.0","3.5",""
"""


def test_each_launch_has_its_metrics_in_base_units():
    first, second = read_launches(OUTPUT)
    assert first["gpu__time_duration.sum"] == 1234.5e3 and second["gpu__time_duration.sum"] == 2e3
    assert stalls(second) == [("barrier", 3.5)]


def test_the_table_has_a_line_a_launch():
    (first, _) = read_launches(OUTPUT)
    row = {"gpu": "g", "driver": "d", "date": "2026", "commit": "c", "label": "8,12,4096,64 causal", "variant": "v"}
    assert "| 8,12,4096,64 causal | v | 1.23e+03 |" in table([{**row, "counters": first}])


def test_the_usual_cases_are_points_of_the_grid():
    assert all(parse_case(label).label == label for label in CASES)
