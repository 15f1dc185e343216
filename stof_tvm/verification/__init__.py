"""Whether an engine computes what PyTorch computes: the reference, the comparison, and where a difference begins."""
