"""Exported programs at a larger size than their inputs have: what of each value is padding, and what must not read it."""
