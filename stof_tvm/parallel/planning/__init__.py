"""Predictions for more GPUs than are there: what a mask costs on meshes of ranks."""
