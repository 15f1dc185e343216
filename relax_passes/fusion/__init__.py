"""Fusion of the operators around attention: operators, schemes, moves between schemes, segments, kernels."""
