"""Kernels of what surrounds attention: matrix products with epilogues, elementwise chains, normalisation."""
