"""FlexAttention functions: what they read, the formulas that they are, and bounds of their values in blocks."""
