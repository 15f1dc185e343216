"""Convolutions as matrix products with gathered rows, their results channel-last."""
