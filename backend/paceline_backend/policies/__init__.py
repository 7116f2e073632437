"""Policies: predictors, schedulers, shufflers and their presets."""
