"""Engines as files: weights, signature and library in one archive, whole or not at all, read strictly."""
