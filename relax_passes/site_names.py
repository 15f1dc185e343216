"""How messages name an attention."""


def named(site: str) -> str:
    """The module path in quotes; the model itself has none."""
    return repr(site) if site else "(the model)"
