"""Sinks: a logit that takes part in a softmax's denominator only, however it is spelled."""
