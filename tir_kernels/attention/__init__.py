"""Sparse multi-head attention kernels: one file a template, `problem.py` says what all of them compute."""
