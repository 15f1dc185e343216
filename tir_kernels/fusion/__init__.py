"""Kernels for the operators around attention: products with epilogues, and chains, norms and embeddings of rows."""
