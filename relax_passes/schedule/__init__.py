"""Schedules for what no kernel of ours computes, and what TVM's lowering needs written otherwise."""
