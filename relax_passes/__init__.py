"""What rewrites: one Relax pass a file; `pipeline.py` is the table of contents."""
