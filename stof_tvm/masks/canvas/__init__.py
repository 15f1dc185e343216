"""Masks of tokens that lie on a canvas: images (H, W) and videos (T, H, W), flattened row by row or tile by tile."""
