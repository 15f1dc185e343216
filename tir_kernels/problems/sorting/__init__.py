"""Kinds of problems that put elements in order."""
