"""What resembles attention and is none, so that a given mask is refused instead of lost."""
