"""Products of more than two matrices."""
