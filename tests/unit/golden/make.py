"""Makes the recorded data in `tests/unit/golden/data`, with the code that is checked out.

    cd tests
    python -m unit.golden.make plans        # simulated runs of every preset
    python -m unit.golden.make database     # recorded runs, by a real control plane and real ranks
    python -m unit.golden.make documents    # what REST answers about the runs of that database
    python -m unit.golden.make show CASE    # a case's segments as JSON, to compare two checkouts

The tests compare what the code does now with the data that is committed. Make data again only where
a difference is wanted, and say in the commit why. `database` takes some two minutes and also makes
the documents, as each recording gives other times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from unit.golden import cases, data, documents, product

CLEAR = 2  # this segment of each case is recorded in clear, too


def main() -> None:
    parser = argparse.ArgumentParser(prog="unit.golden.make")
    kinds = ("plans", "database", "documents", "show")
    parser.add_argument("what", choices=kinds)
    parser.add_argument("case", nargs="?")
    arguments = parser.parse_args()
    if arguments.what == "show":
        show(arguments.case)
    else:
        {
            "plans": make_plans,
            "database": make_database,
            "documents": make_documents,
        }[arguments.what]()


def make_plans() -> None:
    """Records each case's scenario, its segments' digests, and a segment in clear."""
    recorded = {}
    for name, scenario in cases.scenarios().items():
        segments = list(product.segments(scenario))
        recorded[name] = {
            "scenario": scenario,
            "segments": [data.digests(segment) for segment in segments],
            "clear": segments[CLEAR] if len(segments) > CLEAR else segments[-1],
        }
    data.save("plans", recorded)


def make_database() -> None:
    """Records runs, and what REST answers about them."""
    from unit.golden.record import record

    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        database, _ = record(Path(folder))
        data.save_database(database)
    make_documents()


def make_documents() -> None:
    """Records what REST answers about the recorded runs, their replays, and a forecast."""
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        database = data.copy_of_database(Path(folder))
        data.save("documents", documents.answered(database))
        runs = documents.runs(database)
        data.save("replays", {run: product.replayed(database, run) for run in runs.values()})
        data.save("forecasts", documents.forecasts(database))


def show(case: str) -> None:
    """Prints a case's segments in clear."""
    segments = list(product.segments(cases.scenarios()[case]))
    json.dump(segments, sys.stdout, indent=1, sort_keys=True)


if __name__ == "__main__":
    main()
