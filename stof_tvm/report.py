"""What the compiler did with each attention and each segment of a model, as text and as data."""

from collections.abc import Sequence
from dataclasses import dataclass

from tir_kernels.report_rows import (
    NUMBER,
    TEXTS,
    TIME,
    RewrittenRow,
    SegmentRow,
    SiteRow,
    check_fields,
    segment_row,
    site_row,
)

NO_MASK = "none"  # the mask of an attention without one
SKIPPED = "skipped"  # the result where nothing was to be compared


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing an engine with PyTorch: `result` is "passed", "not verified" or "skipped".

    `detail` says how or why, `error` is the largest difference from PyTorch (None where nothing was compared),
    `seconds` the time that the comparison took.
    """

    result: str
    detail: str
    error: float | None = None
    seconds: float = 0.0


VERIFICATION = {"result": str, "detail": str, "error": TIME, "seconds": NUMBER}


@dataclass(frozen=True)
class Report:
    """The report of a build: one row for each attention site and each segment; `str(report)` prints them as tables.

    Attributes
    ----------
    target : str
        The compilation target.
    sites : tuple of SiteRow
        In the model's order; a site that a kernel computes is a RewrittenRow.
    segments : tuple of SegmentRow
        In canonical order.
    fusion_scheme : str
        The scheme that cut the operators into these segments, in hexadecimal.
    tuning : tuple of str
        Lines that say what a tuning log had for this model and which of its records no longer fit; empty where no log
        was replayed.
    verification : Verification or None
        Whether results were compared with PyTorch's at the build; None before that.
    notes : tuple of str
        Differences between the model and what was built, such as a cache of keys and values that was turned off.
    float32 : str
        How float32 is multiplied: "ieee", or "tf32" on a GPU that was asked for it.
    execution : str
        How calls run on a GPU; not stored.
    states : str
        The tensors that calls update, in place or by a copy; not stored.
    found : str
        What share of the pairs each rule of `masks.runtime` kept in the last call; not stored.
    """

    target: str
    sites: tuple[SiteRow, ...]
    segments: tuple[SegmentRow, ...]
    fusion_scheme: str
    tuning: tuple[str, ...] = ()
    verification: Verification | None = None
    notes: tuple[str, ...] = ()
    float32: str = "ieee"
    execution: str = ""
    states: str = ""
    found: str = ""

    @classmethod
    def from_dict(cls, data: dict) -> "Report":
        """The inverse of `to_dict`, which returned `data`.  Raises ValueError, which names the row and field."""
        kinds = {"target": str, "fusion_scheme": str, "sites": list, "segments": list, "tuning": TEXTS}
        check_fields("report", data, kinds)
        later = {"verification": {}, "notes": [], "float32": "ieee", **data}
        check_fields("report", later, {"verification": dict, "notes": TEXTS, "float32": str})
        verification = data.get("verification") or None
        if verification is not None:
            check_fields("verification", verification, VERIFICATION)
            verification = Verification(**{name: verification[name] for name in VERIFICATION})
        return cls(
            data["target"],
            tuple(site_row(row) for row in data["sites"]),
            tuple(segment_row(row) for row in data["segments"]),
            data["fusion_scheme"],
            tuple(data["tuning"]),
            verification,
            tuple(data.get("notes", ())),
            later["float32"],
        )

    @property
    def rewritten(self) -> tuple[RewrittenRow, ...]:
        """The sites that kernels compute."""
        return tuple(site for site in self.sites if isinstance(site, RewrittenRow))

    @property
    def not_rewritten(self) -> tuple[SiteRow, ...]:
        """The sites that stayed dense, each with its reason."""
        return tuple(site for site in self.sites if not site.rewritten)

    def to_dict(self) -> dict:
        """The report as JSON-serialisable data."""
        return {
            "target": self.target,
            "sites": [site.to_dict() for site in self.sites],
            "segments": [segment.to_dict() for segment in self.segments],
            "fusion_scheme": self.fusion_scheme,
            "tuning": list(self.tuning),
            "verification": {} if self.verification is None else dict(vars(self.verification)),
            "notes": list(self.notes),
            "float32": self.float32,
        }

    def __str__(self) -> str:
        lines = [f"target {self.target}", *(f"note: {note}" for note in self.notes), *self._float32_lines()]
        lines.append(self._attention_line())
        rows = [("site", "kernel", "tile", "kept", "blocks", "mask", "why")]
        for site in self.rewritten:
            why = "; ".join([site.reason, *site.notes])
            most, mask = "", site.mask
            if site.rule is not None:  # what it finds is less, and other in each call
                most, mask = "≤ ", site.rule if mask == NO_MASK else f"{site.rule} within {mask}"
            kept, blocks = f"{most}{site.density:.1%}", f"{most}{site.block_density:.1%}"
            rows.append((site.site or "(the model)", site.kernel, site.config, kept, blocks, mask, why))
        if self.rewritten:
            lines += _table(rows)
        lines += _lines_without_skips(self.rewritten)
        if self.not_rewritten:
            lines.append("not rewritten (these stay dense):")
            lines += [f"  {site.site or '(the model)'} [{site.spelling}]: {site.reason}" for site in self.not_rewritten]
        tuning = ["tuning:", *(f"  {line}" for line in self.tuning)] if self.tuning else []
        calls = [f"states: {self.states}"] if self.states else []
        calls += [f"kept in the last call: {self.found}"] if self.found else []
        calls += [f"calls: {self.execution}"] if self.execution else []
        return "\n".join([*lines, *self._segment_lines(), *tuning, *self._verification_lines(), *calls])

    def _float32_lines(self) -> list[str]:
        if self.float32 == "ieee":
            return []
        return [f"float32: {self.float32}, with 11 bits of each number that is multiplied"]

    def _attention_line(self) -> str:
        rewritten = self.rewritten
        if not self.sites:
            return "attention: none was recognised"
        sparse = sum(_skips(site) for site in rewritten)
        kind = "sparse kernels" if sparse == len(rewritten) else f"attention kernels, {sparse} with something to skip"
        return f"attention: {len(rewritten)} of {len(self.sites)} sites on {kind}"

    def _verification_lines(self) -> list[str]:
        if self.verification is None:
            return []
        found = self.verification
        cost = f" ({found.seconds:.2f} s)" if found.error is not None else ""
        return [f"compared with PyTorch: {found.result}, {found.detail}{cost}"]

    def _segment_lines(self) -> list[str]:
        """The table of segments.  Equal segments share one row, at the position of the first of them."""
        if not self.segments:
            return []
        numbers: dict[tuple[str, str, str, str, str, str], list[int]] = {}
        for segment in self.segments:
            times = segment.predicted_us, segment.measured_us
            predicted, measured = ("" if us is None else f"{us:.1f}" for us in times)
            operators, kernel = (
                x.replace("sparse_attention", "attention") for x in (" ".join(segment.operators), segment.kernel)
            )
            if kernel == "default":
                kernel = "TVM"
            what = operators, kernel, segment.config, predicted, measured, segment.reason
            numbers.setdefault(what, []).append(segment.segment)
        rows = [("segment", "operators", "kernel", "config", "predicted µs", "tuned µs", "why")]
        rows += [(f"{n[0]} (×{len(n)})" if len(n) > 1 else str(n[0]), *what) for what, n in numbers.items()]
        count = sum(len(segment.operators) for segment in self.segments)
        head = f"fusion: {count} operators in {len(self.segments)} segments, scheme {self.fusion_scheme}"
        return [head, *_table(rows)]


@dataclass(frozen=True)
class RangeReport:
    """The report of a RangeEngine; `str(report)` prints it.

    Attributes
    ----------
    target : str
        The compilation target.
    shapes : str
        The inputs with the shapes that they may have.
    most_engines : int
        How many engines are kept.
    engines : dict
        The reports of the engines that are kept, by their shapes; the last one was used last, or is the
        largest where all were built at once.
    is_padded : bool
        Whether the engines were all built at once, for inputs that are padded to their shapes.
    """

    target: str
    shapes: str
    most_engines: int
    engines: dict[str, Report]
    is_padded: bool = False

    def to_dict(self) -> dict:
        """The report as JSON-serialisable data."""
        engines = {shapes: report.to_dict() for shapes, report in self.engines.items()}
        return {**vars(self), "engines": engines}

    def __str__(self) -> str:
        lines = [f"target {self.target}", f"a range of shapes: {self.shapes}"]
        kept = "inputs are padded to the next" if self.is_padded else f"at most {self.most_engines} are kept"
        lines.append(f"engines: {len(self.engines)}, {kept}")
        results = {report.verification.result for report in self.engines.values() if report.verification is not None}
        # Sizes of one program: the example's and the largest stand for the others.
        why = "other sizes of the same program were" if self.is_padded and results != {SKIPPED} else "verify=False"
        lines += [f"  {shapes}: {_line(report, why)}" for shapes, report in self.engines.items()]
        if self.engines:
            shapes, report = list(self.engines.items())[-1]
            lines += [f"the last one, of {shapes}:", str(report)]
        return "\n".join(lines)


def _skips(site: RewrittenRow) -> bool:
    """Whether the site's kernel skips anything: whole blocks or, in the row-wise kernel, single keys.

    What a rule finds is known to no report, so that counts as something.
    """
    return site.rule is not None or site.block_density < 1 or site.kernel == "row-wise" and site.density < 1


def _lines_without_skips(rewritten: Sequence[RewrittenRow]) -> list[str]:
    """One line for each reason why kernels skip nothing, with the number of sites that have this reason."""
    counts: dict[str, int] = {}
    for site in rewritten:
        if not _skips(site):
            why = "there is no mask" if site.mask == NO_MASK else "the mask keeps everything"
            if site.density < 1:
                rows, columns = site.block
                why = (
                    f"every block of {rows}×{columns} keeps something, and only a block that keeps nothing is skipped "
                    f"(the mask keeps {site.density:.1%} of the elements)"
                )
            counts[why] = counts.get(why, 0) + 1
    return [f"nothing is skipped at {n} of {len(rewritten)} sites: {why}" for why, n in counts.items()]


def _table(rows) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def _line(report: Report, why_not: str) -> str:
    kernels = ", ".join(dict.fromkeys(site.kernel for site in report.rewritten)) or "none"
    verified = "" if report.verification is None else f"; compared with PyTorch: {report.verification.result}"
    if report.verification is not None and report.verification.result == SKIPPED:
        verified = f"; not compared ({why_not})"
    return f"{len(report.rewritten)} of {len(report.sites)} attentions on kernels ({kernels}){verified}"
