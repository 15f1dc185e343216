"""What a configuration of a matrix product means: tiles, shared memory, registers, predicted time."""
