"""The processes of a run that use TorchElastic: its launcher, and the start of a rank."""
