"""Attention: from every spelling to one composite, from a composite to a sparse kernel."""
