"""Row-wise sparse attention on CUDA, for few queries against many keys.  `kernel.py` reads first."""
