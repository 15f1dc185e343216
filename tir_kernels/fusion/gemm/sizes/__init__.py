"""Tiles, shared memory, registers and predicted time of a matrix product's configuration."""
