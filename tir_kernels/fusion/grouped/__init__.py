"""Grouped products: the rows of one matrix are multiplied by one of several weights each, as experts are."""
