"""Keys of earlier calls that a model puts before new ones: attentions whose queries are no first rows of a mask."""
