"""Advice on the policies of runs, and the measured effects of switches.

- `advisor`: forecasts and decides for runs whose `auto` is on.
- `effects`: stores the effect of each switch.
"""
