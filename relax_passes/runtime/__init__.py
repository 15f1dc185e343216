"""What is left to do once every operator is a PrimFunc: reshapes and memory."""
