"""Results of a script whose rows are a case by a system: the newest of each, a file and a page for each GPU."""

from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu_attention import folder_name
from benchmarks.peers.results import read_rows, write_rows


def merge_newest(
    paths: Iterable[Path], folder: Path, bench: str, page: Callable[[list[dict]], str], fields: Iterable[str]
) -> int:
    """Write <gpu>/<bench>.json and .md of the files' rows: of a case, a GPU and equal `fields` the newest row counts.

    Of rows of one day the last file's is the newest.
    """
    fields, newest = ("gpu", *fields), {}
    for row in sorted(read_rows(paths), key=lambda row: row["date"]):
        newest[(*(row[field] for field in fields), str(sorted(row["case"].items())))] = row
    for gpu in sorted({row["gpu"] for row in newest.values()}):
        rows = [row for row in newest.values() if row["gpu"] == gpu]
        place = folder / folder_name(gpu)
        place.mkdir(parents=True, exist_ok=True)
        write_rows(place / f"{bench}.json", rows)
        (place / f"{bench}.md").write_text(page(rows))
    return 0
