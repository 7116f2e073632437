"""Commands of a control plane.

`access` (tokens, `open`), `database` and `server` are commands.
"""
