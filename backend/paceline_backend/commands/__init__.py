"""Commands of a control plane.

`access` (`paceline token` and `paceline open`), `database` (`paceline db`) and `server` (`paceline
server`) define them.
"""
