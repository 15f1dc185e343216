"""Sums, means, products and extrema along any axes on CUDA, with elementwise operators before and after."""
