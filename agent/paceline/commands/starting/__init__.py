"""Commands that start a training script: `run`, `observe` and `doctor`."""
