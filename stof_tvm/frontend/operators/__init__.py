"""ATen operators to Relax; `table.py` says which converter each has."""
