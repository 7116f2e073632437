"""What runs inside TorchElastic."""
