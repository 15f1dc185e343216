"""Predicted times of the CUDA attention kernels that walk blocks."""
