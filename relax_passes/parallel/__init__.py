"""Tensor parallelism: which values of "main" the ranks divide among them, and the program of one rank."""
