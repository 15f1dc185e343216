"""Kinds of problems, a module each: tensor expressions, random inputs, PyTorch references; and their registry."""
