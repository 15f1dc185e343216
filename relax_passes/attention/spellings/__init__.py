"""Matching of attention as models write it: everything between q·kᵀ and the product with v."""
