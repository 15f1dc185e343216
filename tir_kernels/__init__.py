"""TIR kernels, the data that they read, and the choice among them.  This package needs TVM and NumPy only."""

from tir_kernels.compiling.without_home import name_a_folder_for_caches

name_a_folder_for_caches()
