"""Layouts of scores: as a model may fold or transpose them, and as the matchers expect them."""
