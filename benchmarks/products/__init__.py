"""Every matrix product of the measured models beside cuBLAS, for `gpu_products.py`."""
