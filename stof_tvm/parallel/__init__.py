"""Several processes, one a GPU or CPU, that share the work of an attention or a model."""
