"""Batches without padding: engines that run on the tokens of all sequences in one row."""
