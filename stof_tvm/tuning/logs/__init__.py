"""Tuning logs: written while searching, looked at, merged, and replayed by `build`."""
