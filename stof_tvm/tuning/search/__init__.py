"""The two-stage search: schemes first, then the parameters of kernels."""
