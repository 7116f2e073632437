"""Telemetry of a rank besides its times.

`metrics` checks the metrics that a script reports, and `compiling` counts recompilations by
torch.compile.
"""
