"""What calls need around compiled code: CUDA graphs, aligned tensors, the machine, bounded caches."""
