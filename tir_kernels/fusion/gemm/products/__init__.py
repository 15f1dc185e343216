"""Device code that multiplies fragments of a matrix product: float32 by mma.sync, 16-bit elements by wgmma."""
