"""The report of a search: what it found as data, and as one self-contained HTML page."""

import html
from dataclasses import asdict, dataclass
from pathlib import Path

from stof_tvm.saving.whole_file import write_whole
from stof_tvm.tuning.search.stage_one import Step
from stof_tvm.tuning.search.state import Trial
from tir_kernels.errors import TuningLogError

WIDTH, HEIGHT, MARGIN = 720, 260, 56
STYLE = (
    "body{font:14px sans-serif;max-width:780px;margin:2em auto;color:#222}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ddd;padding:3px 8px;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{background:#fafafa}.kept{font-weight:bold}"
)


@dataclass(frozen=True)
class TaskRow:
    """One task: how often the model runs it, trials, microseconds by default and at best, failures by reason."""

    name: str
    count: int
    trials: int
    default_us: float | None
    best_us: float | None
    failures: dict[str, int]


@dataclass(frozen=True)
class TuningReport:
    """What one search did; `best` as in `TuningResult`.

    `seconds` has "model" (import and passes), "stage_one" and "stage_two".  It also has two sums over both stages:
    "waiting", while the search only waited for measurements, and "deciding": cost model, encoding of candidates and
    reward.
    """

    target: str
    gpu: str
    best: dict
    history: tuple[Trial, ...]
    steps: tuple[Step, ...]
    tasks: tuple[TaskRow, ...]
    seconds: dict[str, float]

    def to_dict(self) -> dict:
        """As JSON-serialisable data."""
        return asdict(self)

    def curve(self) -> list[tuple[int, float, float]]:
        """(trial, seconds, best µs of the model so far) for each trial after which that latency is known.

        `stof_tvm.pictures.tuning_curves` draws it.
        """
        return [(trial.number, trial.seconds, trial.model_us) for trial in self.history if trial.model_us is not None]

    def write(self, path: str | Path) -> None:
        """Write the page to the file `path`, whole or not at all.

        Raises TuningLogError where it cannot be written.
        """
        try:
            write_whole(path, self.html())
        except OSError as error:
            raise TuningLogError(f"{path} cannot be written: {error}") from error

    def html(self) -> str:
        """The page: curves by trial and by second, the moves of stage 1, the tasks."""
        cached = sum(trial.is_cached for trial in self.history)
        failed = sum(trial.us is None for trial in self.history)
        curve = self.curve()
        seconds = self.history[-1].seconds if self.history else 0.0
        best, default = self.best["us"], self.best["default_us"]
        gain = f" ({default / best:.2f}× faster)" if best else ""
        found = "not all known yet" if best is None else f"{best:.1f} µs"
        return "\n".join(
            [
                f"<!doctype html><meta charset=utf-8><title>Tuning report</title><style>{STYLE}</style>",
                "<h1>Tuning report</h1>",
                f"<p>{html.escape(self.gpu)}, target {html.escape(self.target)}</p>",
                f"<p>Sum of the kernels' times: {found}, {default:.1f} µs by default{gain}. {len(self.history)} "
                f"trials in {seconds:.1f} s, {cached} of them from the log, {failed} failed.</p>",
                f"<p>Seconds: {', '.join(f'{name} {value:.1f}' for name, value in self.seconds.items())}.</p>",
                "<h2>Best latency by trial</h2>",
                _curve([(trial, us) for trial, _, us in curve], "trials"),
                "<h2>Best latency by second</h2>",
                _curve([(second, us) for _, second, us in curve], "seconds"),
                f"<h2>Scheme</h2><p>{html.escape(self.best['scheme'])}</p>",
                _table(
                    ("move", "before, µs", "after, µs", "kept"),
                    [(s.move, _us(s.before_us), _us(s.after_us), "yes" if s.kept else "") for s in self.steps],
                ),
                "<h2>Tasks</h2>",
                _table(
                    ("task", "runs", "trials", "default, µs", "best, µs", "failures"),
                    [
                        (t.name, t.count, t.trials, _us(t.default_us), _us(t.best_us), _failures(t.failures))
                        for t in self.tasks
                    ],
                ),
            ]
        )


def _curve(points: list[tuple[float, float]], unit: str) -> str:
    """A step curve as SVG."""
    if not points:
        return "<p>Nothing was measured.</p>"
    right, low = points[-1][0] or 1.0, min(y for _, y in points)
    high = max(y for _, y in points)
    x_of = lambda x: MARGIN + (WIDTH - 2 * MARGIN) * x / right
    y_of = lambda y: HEIGHT - MARGIN / 2 - (HEIGHT - MARGIN) * ((y - low) / (high - low) if high > low else 0.5)
    path = f"M{x_of(points[0][0]):.1f},{y_of(points[0][1]):.1f}"
    path += "".join(f"H{x_of(x):.1f}V{y_of(y):.1f}" for x, y in points[1:])
    labels = [
        f'<text x="4" y="{y_of(high):.0f}">{high:.0f} µs</text>',
        f'<text x="4" y="{y_of(low):.0f}">{low:.0f} µs</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}">{right:.0f} {unit}</text>',
    ]
    line = f'<path d="{path}" fill="none" stroke="#06c" stroke-width="1.5"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="11">{line}{"".join(labels)}</svg>'


def _table(head, rows) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.2f}"


def _failures(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count}× {reason}" for reason, count in sorted(reasons.items(), key=lambda x: -x[1]))
