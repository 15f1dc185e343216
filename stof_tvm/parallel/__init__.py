"""More than one GPU: engines whose ranks, processes under torchrun, compute together."""
