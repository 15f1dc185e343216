"""Fusion schemes: the borders between segments, and the moves between schemes."""
