"""Sinks: logits that are added to a softmax's denominator only, in all the ways that models write them."""
