"""The attention kernel for Hopper (sm_90a) whose warps have roles: one copies blocks, the others compute."""
