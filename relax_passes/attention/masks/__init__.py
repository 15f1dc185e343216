"""Masks inside a model, taken apart into what is constant and what is found at run time."""
