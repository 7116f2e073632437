"""What a worker makes of the runs that it plans: advice on their policies, and what switches did.

- `advisor`: forecasts and decides for runs whose `auto` is on.
- `effects`: keeps the effect of each switch.
"""
