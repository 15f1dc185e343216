"""What every CUDA kernel stands on: tiles, registers, launches, and machine code."""
