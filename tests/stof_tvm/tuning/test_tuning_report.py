"""The page of a search stands by itself and shows what there was."""

from html.parser import HTMLParser

from stof_tvm.tuning.search.stage_one import Step
from stof_tvm.tuning.search.state import Trial
from stof_tvm.tuning.tuning_report import TaskRow, TuningReport

VOID = {"meta", "path"}


def report(history=()) -> TuningReport:
    steps = (Step("expand", "0x5", 10.0, 7.0, True), Step("seize", "0x6", 7.0, 9.0, False))
    tasks = (TaskRow("gemm <1>", 12, 8, 5.0, 4.0, {"wrong numbers: 1 > 0": 2}), TaskRow("take", 1, 0, None, None, {}))
    best = {"scheme": "0x5", "us": 48.0, "default_us": 60.0}
    return TuningReport("cuda", "A <GPU>", best, tuple(history), steps, tasks, {"model": 1.0, "stage_two": 2.0})


HISTORY = [
    Trial(1, 0.5, "gemm", 5.0, "", False, None),
    Trial(2, 1.0, "gemm", 4.0, "", True, 60.0),
    Trial(3, 2.0, "gemm", None, "wrong numbers", False, 60.0),
    Trial(4, 3.0, "gemm", 3.0, "", False, 48.0),
]


class Balanced(HTMLParser):
    """Fails for tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


def test_the_page_holds_everything():
    page = report(HISTORY).html()
    for text in (
        "A &lt;GPU&gt;",
        "gemm &lt;1&gt;",
        "1.25× faster",
        "4 trials",
        "1 of them from the log",
        "1 failed",
        "0x5",
    ):
        assert text in page
    assert page.count("<svg") == 2 and "http" not in page
    Balanced().feed(page)


def test_a_search_without_a_trial_has_a_page():
    assert "Nothing was measured" in report().html()


def test_it_is_written(tmp_path):
    report(HISTORY).write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == report(HISTORY).html()


def test_the_curve_is_of_the_trials_after_which_the_latency_is_known():
    assert report(HISTORY).curve() == [(2, 1.0, 60.0), (3, 2.0, 60.0), (4, 3.0, 48.0)]
