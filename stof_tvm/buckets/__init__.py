"""Engines for a range of shapes in which nothing compiles after the build: one engine for each of a few sizes."""
