"""What there is to compute: one module a kind of problem, and the registry of them."""
