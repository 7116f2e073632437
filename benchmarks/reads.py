"""Reads over REST from a database with 10 million rows of ranks' steps: 95th percentiles.

One run of 8 ranks, of which the rows are written as ingest writes them: so their roll-ups are
there. Asked for are the last 500 steps of all ranks, the workers' summary, 100,000 steps in 1,000
buckets, and the same of each rank. The server is a whole one, with all its processes; the times are
those of a client on the same machine, until it has the answer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from harness import Check, finish, parser
from ingest import WORLD, new_run, records

from paceline.node import tokens
from paceline.wire import StepBatch
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, telemetry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.postgres import Postgres

GOAL_S = 0.05
CHUNK = 2_500  # steps in a transaction


def fill(store: Store, steps: int) -> str:
    """A run with so many complete steps; its id."""
    run = new_run(store)
    for first in range(0, steps, CHUNK):
        end = min(first + CHUNK, steps)
        batches = [(run, StepBatch(records(rank, range(first, end)))) for rank in range(WORLD)]
        telemetry.write(store, batches)
    return run


def questions(run: str, steps: int) -> dict[str, str]:
    """What is asked: name → path."""
    base, last = f"/api/v1/runs/{run}", steps - 1
    long = min(100_000, steps)
    middle = (steps - long) // 2 // 100 * 100
    span = f"from={middle}&to={middle + long - 1}&points=1000"
    return {
        "last 500 steps of 8 workers": f"{base}/worker-steps?from={last - 499}&to={last}",
        "summary of the workers": f"{base}/workers",
        "the run": base,
        "100,000 steps in 1,000 buckets": f"{base}/steps?{span}",
        "the same of each worker": f"{base}/worker-steps?{span}",
    }


def p95_s(client: httpx.Client, path: str, repeats: int) -> float:
    """95th percentile of the time from the request to the whole answer."""
    took = []
    for turn in range(repeats + 3):
        began = time.perf_counter()
        client.get(path).raise_for_status()
        if turn >= 3:  # the first ones warm up
            took.append(time.perf_counter() - began)
    return float(np.percentile(took, 95))


def measure(folder: Path, database: str | None, rows: int, repeats: int) -> dict[str, float]:
    """All figures of one database; None: SQLite in the folder."""
    with Store.open(database or f"sqlite:///{folder / 'paceline.db'}") as store:
        run = fill(store, rows // WORLD)
    with Stack(folder, 0, database=database) as stack:
        headers = {"Authorization": f"Bearer {tokens.kept(stack.url)}"}
        with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as client:
            asked = questions(run, rows // WORLD)
            return {name: p95_s(client, path, repeats) for name, path in asked.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    """The figures for people."""
    names = next(iter(results.values()))
    lines = [f"{'p95':34}" + "".join(f"{database:>12}" for database in results)]
    lines += [
        f"{name:34}" + "".join(f"{1e3 * of[name]:9.1f} ms" for of in results.values())
        for name in names
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=10_000_000, help="of ranks' steps")
    options = made.parse_args()
    rows, repeats = (80_000, 20) if options.quick else (options.rows, 100)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        results["sqlite"] = measure(Path(folder), None, rows, repeats)
    with tempfile.TemporaryDirectory() as folder:
        server = Postgres(fsync=True).start()
        try:
            results["postgres"] = measure(Path(folder), server.database(), rows, repeats)
        finally:
            server.stop()
    checks = [
        Check(f"{database}: {name}, s", value, GOAL_S, "<=")
        for database, of in results.items()
        for name, value in of.items()
    ]
    finish(options, {"rows": rows, "world": WORLD}, results, checks, table(results))


if __name__ == "__main__":
    main()
