"""How messages name an attention."""

THE_MODEL = "(the model)"


def named(site: str) -> str:
    """The module path in quotes; the model itself has none."""
    return repr(site) if site else THE_MODEL
