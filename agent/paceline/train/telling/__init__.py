"""Measurement of a device whose speed is not known by its name; `loop` calls it."""
