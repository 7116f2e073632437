"""Telemetry of a rank besides its times.

`metrics` checks the metrics that a script reports, `compiling` counts recompilations by
torch.compile, and `trial` measures a device whose speed is not known by its name. `session` and
`loop` call them.
"""
