"""What all CUDA kernels share: tiles, registers, launches and machine code."""
