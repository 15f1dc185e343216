"""Masks as kernels read them: block-CSR lists, bitmaps of partial blocks, and counts of blocks."""
