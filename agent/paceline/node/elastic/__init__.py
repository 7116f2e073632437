"""The processes of a run that use TorchElastic: its launcher, and a rank's start."""
