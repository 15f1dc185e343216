"""Merging of products of one input by several constant weights into one product."""
