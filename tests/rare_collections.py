"""Rare garbage collections, for processes that import much and run many tests."""

import gc


def rare_collections() -> None:
    """Never look again at the objects that exist now, and collect later ones in larger portions.

    What imports and pytest's collection make is a million objects: going through them took a tenth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
