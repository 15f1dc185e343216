"""Matching of segments with the problems of the kernel templates."""
