"""Masks found at run time: a rule's function in the graph, and what the program returns of what it found."""
