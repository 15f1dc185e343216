"""From a PrimFunc to something that is called: lowering, compiling, loading and keeping it."""
