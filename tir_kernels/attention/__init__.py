"""Sparse multi-head attention: a folder for each CUDA kernel and one for CPUs; `problem.py` says what all compute."""
