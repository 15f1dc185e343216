"""The table of new lengths: what is reached and what is not."""

from benchmarks.gpu_packing import COLUMNS, LIMIT_US, table


def row(planning_us):
    numbers = dict.fromkeys(COLUMNS, 1.5)
    return {
        "case": "sentences",
        "gpu": "a GPU",
        "date": "a day",
        "commit": "c",
        "torch": "t",
        **numbers,
        "planning_us": planning_us,
    }


def test_the_slowest_case_decides():
    assert "1.0 µs at most (60 wanted): **pass**" in table([row(1.0)])
    assert "**miss**" in table([row(1.0), row(LIMIT_US + 1)])
    assert "| sentences |" in table([row(1.0)]) and "**miss**" in table([row(None)])  # the CPU planned
