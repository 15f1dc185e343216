"""Operators that read or write at positions, known in advance or given by tensors."""
