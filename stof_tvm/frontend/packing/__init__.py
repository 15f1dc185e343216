"""Exported programs of padded batches, rewritten to run on the tokens of all sequences in one row, without padding."""
