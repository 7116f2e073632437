"""What one leader, one bus, one server and one page take: 1,000, 10,000 and 100,000 ranks.

- segment: how long until all ranks have read their parts of a segment (`distribution.py`);
- telemetry: 10,000 ranks that end a step each second, on a whole server (`steady.py`);
- simulator: 100,000 workers through the whole control plane, and the run's page (`simulate.py`).

Nothing trains. The figures are for `docs/scale.md`.
"""

from __future__ import annotations

import argparse
from typing import Any

import distribution
import psutil
import simulate
import steady
from harness import Check, finish, parser

PARTS = ("segment", "telemetry", "simulator")
READ_S = 4.0  # a segment of four steps lasts that long if a step takes a second
PATIENCE_S = 300.0  # for the segments of one number of ranks


def segment(options: argparse.Namespace) -> tuple[dict[str, Any], list[Check], list[str]]:
    """Segments from the leader to all ranks."""
    sizes = (100, 1_000) if options.quick else (1_000, 10_000)
    results, checks, lines = {}, [], []
    for ranks in sizes:
        of = distribution.measure(ranks, 5 if options.quick else 20, PATIENCE_S)
        results[str(ranks)] = of
        read = of["read_s"]
        checks.append(
            Check(f"{ranks} ranks: a segment read by all, p95, s", read["p95"], READ_S, "<=")
        )
        lines.append(
            f"{ranks:,} ranks: the leader plans {of['plan_s']['median']:.4f} s and puts parts "
            f"{of['put_s']['median']:.4f} s; read by half of the ranks after "
            f"{of['median rank_s']['median']:.3f} s, by all after {read['median']:.3f} s, "
            f"p95 {read['p95']:.3f}; connected in {of['connected_s']:.1f} s"
        )
    return results, checks, lines


def telemetry(options: argparse.Namespace) -> tuple[dict[str, Any], list[Check], list[str]]:
    """Rows of ranks that end a step each second."""
    shape = argparse.Namespace(runs=10, ranks=1_000, seconds=300, processes=2, warm_s=60)
    shape.piped = True  # else the ranks alone take more than two cores
    if options.quick:
        shape.ranks, shape.seconds, shape.warm_s = 20, 20, 6
    ranks = shape.runs * shape.ranks
    distribution.open_files(ranks + distribution.SPARE_FILES)
    of = steady.measure(shape, None)
    waits = of["latency_s"]
    # A second's messages are on their way at any time.
    backlog = Check("entries that wait in the end", of["ingest_lag_in_the_end"], ranks, "<=")
    checks = [
        Check("records lost", of["lost"], 0, "<="),
        Check("records written again", of["written_again"], 0, "<="),
        Check("rejected messages", of["rejected_messages"], 0, "<="),
        backlog,
    ]
    rows = of["sent"] / shape.seconds
    cores = ", ".join(f"{name} {used:.2f}" for name, used in of["cpu_cores"].items())
    line = (
        f"{ranks:,} ranks × {shape.seconds} steps: {rows:,.0f} rows a second, {of['lost']} lost; "
        f"event → row p50 {waits['p50']:.2f} s, p99 {waits['p99']:.2f}; sent up to "
        f"{of['late_s']:.2f} s late; entries that wait: at most {of['ingest_lag']:,}, in the end "
        f"{of['ingest_lag_in_the_end']:,}; cores: {cores}"
    )
    return {**vars(shape), **of}, checks, [line]


def simulator(options: argparse.Namespace) -> tuple[dict[str, Any], list[Check], list[str]]:
    """A run of many simulated workers, and its page."""
    workers, steps = (2_000, 20) if options.quick else (100_000, 100)
    of = simulate.measure(simulate.scenario(workers, steps, "paceline"), simulate.OF_PAGE)
    lines = [f"{workers:,} workers × {steps} steps:", simulate.table(of, workers * steps)]
    return of, simulate.checks_of(of), lines


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    options = made.parse_args()
    measures = {"segment": segment, "telemetry": telemetry, "simulator": simulator}
    config: dict[str, Any] = {"load_of_the_machine": psutil.getloadavg()}
    results: dict[str, Any] = {}
    checks: list[Check] = []
    lines: list[str] = []
    for name in options.part or PARTS:
        results[name], more, text = measures[name](options)
        checks += more
        lines += text
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
