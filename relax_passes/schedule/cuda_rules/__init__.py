"""Schedule rules for CUDA beside TVM's."""
