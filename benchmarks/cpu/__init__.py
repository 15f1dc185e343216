"""Whole models on a CPU: the cases, the systems, a process for each, and the page."""
