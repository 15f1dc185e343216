"""Row-wise sparse attention on CUDA, for few queries against many keys.  Start with `kernel.py`."""
