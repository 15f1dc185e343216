"""Whole models: cases, the models themselves, what runs them, and the report."""
