"""What the compiler did with each attention of a model, as text and as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One row an attention site; `str(report)` is the table that people read.

    Attributes
    ----------
    target : str
        The compilation target.
    sites : tuple of dict
        In the model's order.  Each has "site" (module path), "spelling", "rewritten" and "reason"; rewritten ones also
        "kernel", "config", "block", "mask", "mask_digest", "density", "block_density", "shape", "layouts",
        "predicted_us" and "notes".
    """

    target: str
    sites: tuple[dict, ...]

    @property
    def not_rewritten(self) -> tuple[dict, ...]:
        """The sites that stayed dense, each with its reason."""
        return tuple(site for site in self.sites if not site["rewritten"])

    def to_dict(self) -> dict:
        """The report as JSON-serialisable data."""
        return {"target": self.target, "sites": list(self.sites)}

    def __str__(self) -> str:
        rewritten = [site for site in self.sites if site["rewritten"]]
        lines = [f"target {self.target}", f"attention: {len(rewritten)} of {len(self.sites)} sites on sparse kernels"]
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
        if self.not_rewritten:
            lines.append("not rewritten (these stay dense):")
            lines += [
                f"  {site['site'] or '(the model)'} [{site['spelling']}]: {site['reason']}"
                for site in self.not_rewritten
            ]
        return "\n".join(lines)


def _table(rows) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
