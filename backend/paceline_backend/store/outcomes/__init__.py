"""What was forecast of policies, and what became of switches.

- `forecasts`: forecasts with the decisions of `auto`.
- `effects`: the effect of each switch. Its rows outlast their runs.
"""
