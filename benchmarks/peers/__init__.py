"""The systems that the GPU attention benchmark compares, on one grid of cases, and the tables made of their times."""
