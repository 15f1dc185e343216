"""Block-wise sparse attention on CUDA: the paper's Algorithm 1.  Start with `kernel.py`."""
