"""What `sparse_attention` launches: kernels with their masks on the device, for all rows or for some at a time."""
