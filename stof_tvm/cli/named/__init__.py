"""What arguments name: models of a module, masks and rules as text or in a file, tensors in files."""
