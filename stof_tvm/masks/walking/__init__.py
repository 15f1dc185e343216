"""From patterns to block lists: which blocks are asked for, and which are looked at element by element."""
