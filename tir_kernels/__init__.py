"""What runs: TIR kernels and the data they read.  Knows TVM and NumPy, nothing above it."""

from tir_kernels.compiling.without_home import name_a_folder_for_caches

name_a_folder_for_caches()
