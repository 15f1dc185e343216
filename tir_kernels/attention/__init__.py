"""Sparse multi-head attention kernels: one file for each template; `problem.py` defines what all of them compute."""
