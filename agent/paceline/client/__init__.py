"""What a notebook or a script asks a server: runs, their steps as data frames, figures.

    import paceline

    with paceline.connect("http://127.0.0.1:8000") as server:
        run = server.run("3f9a")              # a beginning of an id that no other has
        steps = run.steps()                   # a DataFrame, a row for each step
        run.plot().show()                     # a figure of Plotly
        server.runs(tag="nightly", sort="-waste")[0].export("worst.parquet", "worker-steps")

Data frames are pandas' (`pip install 'paceline[notebook]'`), or with ``frames="polars"`` those of
polars. Called by users, and by `paceline runs`.
"""

from paceline.client.server import Run, Server, connect

__all__ = ["Run", "Server", "connect"]
