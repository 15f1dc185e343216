"""Tuning: the tuned model, the variants of the search, and the report."""
