"""Generation of text: cases, what generates, requirements and the page."""
