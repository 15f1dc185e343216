"""How messages name an attention."""

THE_MODEL = "(the model)"


def named(site: str) -> str:
    """The module path in quotes, or `THE_MODEL` where the path is empty."""
    return repr(site) if site else THE_MODEL
