"""Relax operators of this project, which TVM does not have."""
