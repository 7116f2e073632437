"""What ranks, control plane and simulator share: no torch, no I/O."""
