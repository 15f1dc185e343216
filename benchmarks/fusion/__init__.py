"""Fused kernels beside PyTorch's: what is measured, by whom, and what must be reached."""
