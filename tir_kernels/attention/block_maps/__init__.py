"""Lists and work items on the GPU, from a block map that is known only when the kernel runs."""
