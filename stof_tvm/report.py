"""What the compiler did with each attention and each segment of a model, as text and as data."""

from dataclasses import dataclass, field

NUMBER, TIME = int | float, int | float | None
# What rows of a report have; a site that was rewritten has both of the first.
SITE = {"site": str, "spelling": str, "rewritten": bool, "reason": str}
KERNEL = {
    "kernel": str,
    "config": str,
    "block": list,
    "mask": str,
    "mask_digest": str,
    "density": NUMBER,
    "block_density": NUMBER,
    "shape": dict,
    "layouts": list,
    "predicted_us": TIME,
    "measured_us": TIME,
    "notes": list,
}
SEGMENT = {
    "segment": int,
    "operators": list,
    "kernel": str,
    "config": str,
    "predicted_us": TIME,
    "measured_us": TIME,
    "reason": str,
}
VERIFICATION = {"result": str, "detail": str, "error": TIME, "seconds": NUMBER}


@dataclass(frozen=True)
class Report:
    """The report of a build: one row for each attention site and each segment; `str(report)` prints them as tables.

    Attributes
    ----------
    target : str
        The compilation target.
    sites : tuple of dict
        In the model's order.  Each has "site" (module path), "spelling", "rewritten", "reason", "density" and
        "block_density" (shares of the elements kept and of the blocks computed, 1 where it stays dense); rewritten ones
        also "kernel", "config", "block", "mask", "mask_digest", "shape", "layouts", "predicted_us", "measured_us" (of a
        tuning log, or None) and "notes".
    segments : tuple of dict
        In canonical order.  Each has "segment" (its number), "operators" (their names), "kernel" (a template's name,
        "default" for functions of TVM's, or an attention's), "config" (a template's parameters; on a CPU, of "default",
        what scheduled the functions: a rule or a tuning record), "predicted_us" (None where nothing predicts it),
        "measured_us" and "reason".
    fusion_scheme : str
        The scheme that cut the operators into these segments, in hexadecimal.
    tuning : tuple of str
        Lines on the tuning log: what it had for this model, and records that no longer fit; empty if none was replayed.
    verification : dict
        Whether results were compared with PyTorch's at the build: "result" is "passed", "not verified" or "skipped",
        "detail" says how or why, "error" is the largest difference (None where nothing was compared), "seconds" the
        cost.  Empty before that.
    notes : tuple of str
        Differences between the model and what was built, such as a cache of keys and values that was turned off.
    execution : str
        How calls run on a GPU; not stored.
    """

    target: str
    sites: tuple[dict, ...]
    segments: tuple[dict, ...]
    fusion_scheme: str
    tuning: tuple[str, ...] = ()
    verification: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    execution: str = ""

    @classmethod
    def from_dict(cls, data: dict) -> "Report":
        """The inverse of `to_dict`, which made `data`.  ValueError, naming row and field, for malformed data."""
        _check(data, "report", {"target": str, "fusion_scheme": str, "sites": list, "segments": list, "tuning": list})
        for site in data["sites"]:
            _check(site, "site", SITE)
            if site["rewritten"]:
                _check(site, "site", KERNEL)
        for segment in data["segments"]:
            _check(segment, "segment", SEGMENT)
        _check_texts([site.get("notes", []) for site in data["sites"]], "notes")
        _check_texts([segment["operators"] for segment in data["segments"]], "operators")
        _check_texts([data["tuning"]], "tuning")
        if data.get("verification", {}) != {}:
            _check(data["verification"], "verification", VERIFICATION)
        _check_texts([data.get("notes", [])], "notes")
        sites, segments, tuning = (tuple(data[name]) for name in ("sites", "segments", "tuning"))
        verification, notes = data.get("verification", {}), tuple(data.get("notes", ()))
        return cls(data["target"], sites, segments, data["fusion_scheme"], tuning, verification, notes)

    @property
    def not_rewritten(self) -> tuple[dict, ...]:
        """The sites that stayed dense, each with its reason."""
        return tuple(site for site in self.sites if not site["rewritten"])

    def to_dict(self) -> dict:
        """The report as JSON-serialisable data."""
        return {
            "target": self.target,
            "sites": list(self.sites),
            "segments": list(self.segments),
            "fusion_scheme": self.fusion_scheme,
            "tuning": list(self.tuning),
            "verification": self.verification,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rewritten = [site for site in self.sites if site["rewritten"]]
        lines = [f"target {self.target}", *(f"note: {note}" for note in self.notes)]
        lines.append(self._attention_line(rewritten))
        rows = [("site", "kernel", "tile", "kept", "blocks", "mask", "why")]
        for site in rewritten:
            why = "; ".join([site["reason"], *site["notes"]])
            rows.append(
                (
                    site["site"] or "(the model)",
                    site["kernel"],
                    site["config"],
                    f"{site['density']:.1%}",
                    f"{site['block_density']:.1%}",
                    site["mask"],
                    why,
                )
            )
        if rewritten:
            lines += _table(rows)
        lines += _lines_without_skips(rewritten)
        if self.not_rewritten:
            lines.append("not rewritten (these stay dense):")
            lines += [
                f"  {site['site'] or '(the model)'} [{site['spelling']}]: {site['reason']}"
                for site in self.not_rewritten
            ]
        tuning = ["tuning:", *(f"  {line}" for line in self.tuning)] if self.tuning else []
        calls = [f"calls: {self.execution}"] if self.execution else []
        return "\n".join([*lines, *self._segment_lines(), *tuning, *self._verification_lines(), *calls])

    def _attention_line(self, rewritten: list[dict]) -> str:
        if not self.sites:
            return "attention: none was recognised"
        sparse = sum(_skips(site) for site in rewritten)
        kind = "sparse kernels" if sparse == len(rewritten) else f"attention kernels, {sparse} with something to skip"
        return f"attention: {len(rewritten)} of {len(self.sites)} sites on {kind}"

    def _verification_lines(self) -> list[str]:
        if not self.verification:
            return []
        result, detail, seconds = (self.verification[name] for name in ("result", "detail", "seconds"))
        cost = f" ({seconds:.2f} s)" if self.verification["error"] is not None else ""
        return [f"compared with PyTorch: {result}, {detail}{cost}"]

    def _segment_lines(self) -> list[str]:
        """The table of segments: one row for equal segments, in the order of the first of each."""
        if not self.segments:
            return []
        numbers = {}
        for segment in self.segments:
            times = ["" if us is None else f"{us:.1f}" for us in (segment["predicted_us"], segment["measured_us"])]
            operators, kernel = (
                x.replace("sparse_attention", "attention") for x in (" ".join(segment["operators"]), segment["kernel"])
            )
            if kernel == "default":
                kernel = "TVM"
            what = operators, kernel, segment["config"], *times, segment["reason"]
            numbers.setdefault(what, []).append(segment["segment"])
        rows = [("segment", "operators", "kernel", "config", "predicted µs", "tuned µs", "why")]
        rows += [(f"{n[0]} (×{len(n)})" if len(n) > 1 else str(n[0]), *what) for what, n in numbers.items()]
        operators = sum(len(segment["operators"]) for segment in self.segments)
        head = f"fusion: {operators} operators in {len(self.segments)} segments, scheme {self.fusion_scheme}"
        return [head, *_table(rows)]


def _skips(site: dict) -> bool:
    """Whether a kernel skips anything: whole blocks, or single keys of a row."""
    return site["block_density"] < 1 or site["kernel"] == "row-wise" and site["density"] < 1


def _lines_without_skips(rewritten: list[dict]) -> list[str]:
    """Why kernels skip nothing, a line for each reason, with the number of sites that it holds for."""
    counts = {}
    for site in rewritten:
        if not _skips(site):
            why = "the mask keeps everything"
            if site["density"] < 1:
                rows, columns = site["block"]
                why = (
                    f"every block of {rows}×{columns} keeps something, and only a block that keeps nothing is skipped "
                    f"(the mask keeps {site['density']:.1%} of the elements)"
                )
            counts[why] = counts.get(why, 0) + 1
    return [f"nothing is skipped at {n} of {len(rewritten)} sites: {why}" for why, n in counts.items()]


def _check(row, name: str, fields: dict) -> None:
    for entry, kind in fields.items():
        if not isinstance(row, dict) or not isinstance(row.get(entry, ...), kind):
            raise ValueError(f"{name} {str(row)[:40]} lacks {entry!r} or has a malformed one")


def _check_texts(lists, field: str) -> None:
    for texts in lists:
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{field} {str(texts)[:40]} must be a list of text")


def _table(rows) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
