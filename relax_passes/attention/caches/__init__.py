"""Attention over caches: states of keys and values into which a call writes new tokens."""
