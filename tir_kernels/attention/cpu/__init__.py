"""Sparse attention on CPUs, block-wise and row-wise."""
