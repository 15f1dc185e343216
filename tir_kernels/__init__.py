"""What runs: TIR kernels and the data they read.  Knows TVM and NumPy, nothing above it."""

from tir_kernels.without_home import let_tvm_be_imported

let_tvm_be_imported()
