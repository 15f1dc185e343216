"""FlexAttention functions read as formulas, and bounds of their values in blocks."""
