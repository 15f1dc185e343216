"""Detection of attention-like computations that no matcher takes, so that a given mask is refused, not lost."""
