"""Presets: one file for each that decides batches."""
