"""`torch.compile(backend="stof")`: TorchDynamo's graphs compiled to engines."""
