"""Tuning: the two-stage search, how it measures, and the logs that it leaves."""
