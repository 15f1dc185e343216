"""Masks inside a model: constant parts, parts that are known at run time, numbers of keys."""
