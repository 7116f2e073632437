"""The client for notebooks and scripts: runs, their steps as data frames, and figures.

    import paceline

    with paceline.connect("http://127.0.0.1:8000") as server:
        run = server.run("3f9a")              # a unique prefix of the run's id
        steps = run.steps()                   # a DataFrame, a row for each step
        run.plot().show()                     # a Plotly figure
        server.runs(tag="nightly", sort="-waste")[0].export("worst.parquet", "worker-steps")

The data frames are pandas data frames (`pip install 'paceline[notebook]'`). With
``connect(frames="polars")`` they are polars data frames. Users and `paceline runs` call this
package.
"""

from paceline.client.server import Run, Server, connect

__all__ = ["Run", "Server", "connect"]
