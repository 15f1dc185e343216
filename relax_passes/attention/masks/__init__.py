"""Masks inside a model, split into constant parts and parts that are known at run time."""
