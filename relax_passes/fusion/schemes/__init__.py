"""Fusion schemes: where the borders between segments lie, and the moves between schemes."""
