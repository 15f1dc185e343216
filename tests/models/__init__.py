"""Small models that several tests share, written the ways in which people write Transformers."""
