"""How a text is chosen: a prompt that is begun early, and the loop over its tokens."""
