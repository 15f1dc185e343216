"""CUDA kernels that sort rows: a kernel that sorts runs of up to 1024 elements, and one that merges runs."""
