"""Passes after every operator is a PrimFunc: reshapes and memory."""
