"""Operators that compute each element by itself, in the dtype that PyTorch computes in."""
