"""Fusion of what surrounds attention: operators, schemes and the moves between them, groups, and their kernels."""
