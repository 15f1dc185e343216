"""What docs/command_line.md says of the commands' JSON."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"


def fields(command: str) -> set[str]:
    """The names in the row of a command."""
    rows = [line.partition(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    (row,) = [told for names, _, told in rows if f"`{command}`" in names]
    return set(re.findall(r"`(\w+)`", row))
