"""The processes of a run that use TorchElastic: launcher, rendezvous store, and a rank's start."""
