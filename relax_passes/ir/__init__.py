"""Tools for Relax functions: bindings, known values and bounds, and rewriting."""
