"""Mutated inputs for everything that reads a file or a text: `python -m tests.robustness.fuzz --help`."""
