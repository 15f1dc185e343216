"""What runs: TIR kernels and the data they read.  Knows TVM and NumPy, nothing above it."""
