"""Masks as kernels read them: block-CSR lists, bitmaps of partial blocks, and what is counted of them."""
