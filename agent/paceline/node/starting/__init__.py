"""Runs that an operator starts from a terminal or a batch job.

- `foreground`: `paceline run` on this node;
- `several`: `paceline run --nodes`, whose ranks agents start;
- `observing`: `paceline observe`;
- `examining`: `paceline doctor`;
- `resume`: `paceline resume`.

`progress` polls the server for the state of a run, and `screen` shows it in a terminal.
"""
