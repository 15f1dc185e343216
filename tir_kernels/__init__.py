"""The code that runs: TIR kernels and the data they read.  It depends on TVM and NumPy only."""

from tir_kernels.compiling.without_home import name_a_folder_for_caches

name_a_folder_for_caches()
