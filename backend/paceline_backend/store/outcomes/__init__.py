"""Forecasts of policies, and the measured effects of policy switches.

- `forecasts`: forecasts with the decisions of `auto`.
- `effects`: the effect of each switch, in rows that outlive the runs.
"""
