"""Operators that Relax lacks, as the formulas that stand for them."""
