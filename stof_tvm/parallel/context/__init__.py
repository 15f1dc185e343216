"""Context parallelism: the sequence is cut among ranks, and keys and values that masks ask for are exchanged."""
