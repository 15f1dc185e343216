"""Domains of groups cut into boxes, where a source does not lie as the results do: what they are, and their code."""
