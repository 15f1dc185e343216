"""How messages name an attention, and which patterns do."""

import fnmatch

THE_MODEL = "(the model)"


def named(site: str) -> str:
    """The module path in quotes, or `THE_MODEL` where the path is empty."""
    return repr(site) if site else THE_MODEL


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the site's module or a module that contains it."""
    steps = path.partition("#")[0].split(".")
    owners = [".".join(steps[:n]) for n in range(1, len(steps) + 1)]
    return any(fnmatch.fnmatchcase(owner, pattern) for owner in (path, *owners))
