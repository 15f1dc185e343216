"""Lowering, compiling, loading and caching of PrimFuncs."""
