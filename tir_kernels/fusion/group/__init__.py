"""Kernels of elementwise groups: any graph of elementwise operators and views, with a norm of rows or none."""
