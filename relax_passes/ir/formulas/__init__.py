"""Formulas for operators that Relax lacks."""
