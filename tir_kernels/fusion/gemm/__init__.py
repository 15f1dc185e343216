"""Matrix products: the templates gemm, gemm_norm and gemv, and their device code."""
