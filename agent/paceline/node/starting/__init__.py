"""Runs that somebody begins from a terminal or a job of their own, and that are not asked for.

- `foreground`: `paceline run` on this node;
- `several`: `paceline run --nodes`, which agents train;
- `resume`: `paceline resume`;
- `adoption`: `paceline node SCRIPT`.
"""
