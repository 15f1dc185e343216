"""Tensor parallelism of a LLaMA-like model: the model, and PyTorch's own division of it."""
