"""Attention and blocks of video transformers under sliding tiles: cases, systems, what is measured, the page."""
