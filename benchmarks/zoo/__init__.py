"""Models that nobody here tuned, at their published base sizes, for `gpu_zoo.py`."""
