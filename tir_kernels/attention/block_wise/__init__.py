"""Block-wise sparse attention on CUDA: the paper's Algorithm 1.  `kernel.py` reads first."""
