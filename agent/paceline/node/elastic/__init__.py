"""The launcher of a run, which uses TorchElastic, and the start of its ranks."""
