"""Kernels that choose: which blocks an attention keeps, by scores that are known only when it runs."""
