"""Commands with which an operator starts, resumes or examines a training in a terminal.

- `foreground`: `paceline run` on this node;
- `several`: `paceline run --nodes`, for which agents start the ranks;
- `observing`: `paceline observe`;
- `examining`: `paceline doctor`;
- `resume`: `paceline resume`.

`progress` polls the server for the progress of a run, and `screen` shows it in the terminal.
"""
