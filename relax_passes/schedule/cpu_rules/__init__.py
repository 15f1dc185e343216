"""Schedule rules for LLVM: each takes an unscheduled PrimFunc and gives a schedule, or None when it does not apply."""
