"""The environment of compiled code: CUDA graphs, aligned tensors, checks of the machine, bounded caches."""
