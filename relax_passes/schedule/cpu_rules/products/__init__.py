"""Dense products on LLVM: register tiles, and constant matrices stored in panels as wide as these."""
