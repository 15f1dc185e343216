"""How attention is spelled: what is matched between q·kᵀ and the product with v."""
