"""Masks as kernels read them: block-CSR lists, bitmaps of part blocks, and what is counted of them."""
