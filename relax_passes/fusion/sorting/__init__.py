"""Sorts of rows, and counts of elements, in the forms that this project's kernels compute."""
