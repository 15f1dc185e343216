"""float32 on tensor cores: the modes that a user chooses from, and the products of fragments."""
