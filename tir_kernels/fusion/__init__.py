"""Kernels for the operators around attention: matrix products with epilogues, elementwise chains, norms."""
