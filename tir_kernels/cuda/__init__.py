"""What all CUDA kernels share: facts about GPUs, instructions, tiles, registers, launches and machine code."""
