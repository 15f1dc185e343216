"""Kernels that read and write rows once: elementwise chains, norms, embeddings, rotary positions."""
