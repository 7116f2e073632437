"""A control plane at its daily work: 1,000 workers that each end a step every second, for minutes.

The server is the one that users start: `paceline server` with its web process, worker and embedded
bus, on SQLite or Postgres. 125 runs of 8 ranks report to it from a few processes (`fleet.py` says
what of them is emulated), and are planned by policies that differ from run to run. Meanwhile an
operator reads something over REST each second, and watches one run's event stream.

Asked is: is every record in the database, once; how long after a step's end a reader of the
database finds its row; and whether processes take more memory in the last minute than in the first
after warming up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import sqlalchemy as sa
from harness import Check, finish, parser

from paceline.node import tokens
from paceline.node.processes import die_with_parent
from paceline.wire.bus import connect
from paceline_backend.requests import rejected, streams
from paceline_backend.server import heartbeat
from paceline_backend.server.stack import Stack
from paceline_backend.server.supervisor import embedded_database
from paceline_backend.store import Store, schema

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.postgres import Postgres

POLICIES = ("paceline", "chronica", "sata", "bsp")  # of the runs, in turn
GOAL_S = 1.0
GROWTH, GROWTH_MIB = 1.05, 16.0  # of a process: at most so many times as much, and so much more
SAMPLED = 25  # of each so many-th run every row's latency is measured
# Between two looks of the reader, which cost more the more ranks a run has: a latency is told up to
# so much too long.
_LOOK_S, _LOOK_S_PER_RANK = 0.025, 1e-4
_PATIENCE_S = 60.0  # for the last rows
_MIB = 2**20


def every(period_s: float, stop: threading.Event) -> Iterator[float]:
    """Seconds since the start, once in each period, until `stop` is set."""
    began = time.monotonic()
    for turn in itertools.count():
        if stop.wait(max(0.0, began + turn * period_s - time.monotonic())):
            return
        yield time.monotonic() - began


@dataclass
class Watch:
    """What the server's processes take, once a second."""

    processes: dict[str, psutil.Process]
    bus: str
    store: Store
    resident_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bus_mib: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)  # entries that waited on the bus
    cpu: dict[str, float] = field(default_factory=dict)  # cores, in the mean

    def run(self, stop: threading.Event) -> None:
        """Looks until `stop` is set."""
        began, used_s = time.monotonic(), self._used_s()
        with connect(self.bus) as client:
            for _ in every(1.0, stop):
                for name, process in self.processes.items():
                    self.resident_mib[name].append(process.memory_info().rss / _MIB)
                info: Any = client.info("memory")
                self.bus_mib.append(info["used_memory"] / _MIB)
                lags = [beat.lag for beat in heartbeat.beats(client)]
                self.lags.append(max(streams.waiting(client, self.store), *lags))
        took_s = time.monotonic() - began
        self.cpu = {name: (now - used_s[name]) / took_s for name, now in self._used_s().items()}

    def _used_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: of.user + of.system for name, of in times.items()}


@dataclass
class Reader:
    """Looks into the database for new rows of some runs."""

    store: Store
    runs: Sequence[str]
    warm_s: float  # rows of steps that ended before are left out
    look_s: float
    waits_s: list[float] = field(default_factory=list)
    warming_s: list[float] = field(default_factory=list)  # of those

    def run(self, stop: threading.Event) -> None:
        """Looks until `stop` is set. It finds each row once: a run's steps come in order."""
        c = schema.worker_steps.c
        with self.store.read() as connection:
            ids = sa.select(schema.runs.c.key).where(schema.runs.c.id.in_(self.runs))
            keys = list(connection.execute(ids).scalars())
        rows = sa.select(c.step, c.rank, c.ended_at).where(
            c.run == sa.bindparam("key"), c.step >= sa.bindparam("first")
        )
        known: dict[int, set[tuple[int, int]]] = {key: set() for key in keys}
        warm_at = time.time() + self.warm_s
        for _ in every(self.look_s, stop):
            for key in keys:
                seen = known[key]
                first = max((step for step, _ in seen), default=0) - 1
                with self.store.read() as connection:
                    new = connection.execute(rows, {"key": key, "first": max(0, first)}).all()
                now = time.time()
                ended = [at for step, rank, at in new if (step, rank) not in seen]
                self.waits_s += [now - at for at in ended if at >= warm_at]
                self.warming_s += [now - at for at in ended if at < warm_at]
                known[key] = {(step, rank) for step, rank, _ in new}


@dataclass
class Operator:
    """Reads over REST each second, and follows a run's events."""

    url: str
    runs: Sequence[str]
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    events: int = 0

    def read(self, stop: threading.Event) -> None:
        """Asks for this and that until `stop` is set."""
        runs = itertools.cycle(self.runs)
        questions = itertools.cycle(self._questions())
        with self._client() as client:
            for _ in every(1.0, stop):
                name, path = next(questions)
                began = time.perf_counter()
                client.get(path.format(run=next(runs))).raise_for_status()
                self.took_s[name].append(time.perf_counter() - began)

    def follow(self, stop: threading.Event) -> None:
        """Counts a run's events until `stop` is set."""
        path = f"/api/v1/runs/{self.runs[0]}/events"
        with self._client() as client, client.stream("GET", path) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                self.events += line.startswith("data:")
                if stop.is_set():
                    return

    def _questions(self) -> Iterator[tuple[str, str]]:
        yield "runs", "/api/v1/runs"
        yield "a run", "/api/v1/runs/{run}"
        yield "steps", "/api/v1/runs/{run}/steps"
        yield "workers", "/api/v1/runs/{run}/workers"
        yield "steps of workers", "/api/v1/runs/{run}/worker-steps"

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {tokens.kept(self.url)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30.0, trust_env=False)


class Fleet:
    """The processes that report; a context manager."""

    def __init__(self, url: str, data: Path, options: argparse.Namespace) -> None:
        runs = [(seed, POLICIES[seed % len(POLICIES)]) for seed in range(options.runs)]
        common = {"server": url, "data": str(data), "ranks": options.ranks}
        common |= {"steps": options.seconds, "piped": options.piped}
        program = [sys.executable, str(Path(__file__).with_name("fleet.py"))]
        self.processes = [
            subprocess.Popen(
                [*program, json.dumps({**common, "runs": runs[part :: options.processes]})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent,
            )
            for part in range(options.processes)
        ]
        self.runs: list[str] = [run for line in self._lines() for run in json.loads(line)]

    def begin(self) -> None:
        """Lets all runs begin to train."""
        begins = time.time() + 1.0
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{begins}\n")
            process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """What was sent, once all runs have ended."""
        parts = [json.loads(line) for line in self._lines()]
        if failures := [failure for part in parts for failure in part["failures"]]:
            raise RuntimeError("; ".join(failures[:5]))
        segments = sum((Counter(part["segments"]) for part in parts), Counter[str]())
        return {
            "unsent": sum(part["unsent"] for part in parts),
            "late_s": max(part["late_s"] for part in parts),
            "segments": dict(segments),
        }

    def _lines(self) -> Iterator[str]:
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process of the fleet ended with code {process.wait()}")
            yield line

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with suppress(OSError, ValueError):
                process.communicate(timeout=10)
            process.kill()


def parts_of(stack: Stack) -> dict[str, psutil.Process]:
    """The server's processes by what they are."""
    assert stack.server is not None
    server = psutil.Process(stack.server.pid)
    parts = {"supervisor": server}
    for child in server.children():
        words = child.cmdline()
        name = next((part for part in ("web", "worker") if part in words), "bus")
        parts[name] = child
    # A fork of the worker, which has the worker's command line.
    parts["ingest"] = next(
        child for child in parts["worker"].children() if "worker" in child.cmdline()
    )
    return parts


@contextmanager
def alongside(*works: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs each in a thread until the block ends; raises what one of them raised."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def stored(store: Store, runs: Sequence[str], rows: int) -> dict[str, int]:
    """Rows, complete steps and finished runs, once there are as many rows as were sent."""
    ids = sa.select(schema.runs.c.key).where(schema.runs.c.id.in_(runs)).scalar_subquery()

    def count(table: sa.Table) -> int:
        query = sa.select(sa.func.count()).select_from(table).where(table.c.run.in_(ids))
        with store.read() as connection:
            return int(connection.execute(query).scalar_one())

    deadline = time.monotonic() + _PATIENCE_S
    while (present := count(schema.worker_steps)) < rows and time.monotonic() < deadline:
        time.sleep(0.5)
    over = sa.select(sa.func.count()).where(
        schema.runs.c.id.in_(runs), schema.runs.c.state == "finished"
    )
    with store.read() as connection:
        finished = int(connection.execute(over).scalar_one())
    return {"rows": present, "steps": count(schema.steps), "finished": finished}


def written(client: Any) -> int:
    """Records that workers have written, those that came again included."""
    return sum(beat.rows for beat in heartbeat.beats(client))


def measure(options: argparse.Namespace, database: str | None) -> dict[str, Any]:
    """All figures of one database."""
    with ExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
        stack = exit_stack.enter_context(Stack(folder / "server", 0, database=database))
        url = database or embedded_database(stack.data.resolve())
        store = exit_stack.enter_context(Store.open(url))
        bus = stack.api("GET", "/version")["bus"]
        fleet = exit_stack.enter_context(Fleet(stack.url, folder / "node", options))
        watch = Watch(parts_of(stack), bus, store)
        look_s = max(_LOOK_S, _LOOK_S_PER_RANK * options.ranks)
        reader = Reader(store, fleet.runs[::SAMPLED], options.warm_s, look_s)
        operator = Operator(stack.url, fleet.runs)
        with alongside(watch.run, reader.run, operator.read, operator.follow):
            fleet.begin()
            sent_by_fleet = fleet.report()
            lag_in_the_end = watch.lags[-1]
            sent = options.runs * options.ranks * options.seconds
            in_store = stored(store, fleet.runs, sent)
        with connect(bus) as client:
            time.sleep(2 * heartbeat.BEAT_S)
            again, (refused, _) = written(client) - sent, rejected.counts(client)
    return {
        "sent": sent,
        **in_store,
        **sent_by_fleet,
        "lost": sent - in_store["rows"],
        "written_again": again,
        "rejected_messages": refused,
        "latency_s": _percentiles(reader.waits_s),
        "latencies": len(reader.waits_s),
        "latency_warming_up_s": _percentiles(reader.warming_s),
        "rest_s": {name: _percentiles(took) for name, took in operator.took_s.items()},
        "events": operator.events,
        "ingest_lag": max(watch.lags),
        "ingest_lag_in_the_end": lag_in_the_end,
        "cpu_cores": watch.cpu,
        "memory_mib": {
            name: _first_and_last(values, options)
            for name, values in {**watch.resident_mib, "bus, data": watch.bus_mib}.items()
        },
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": max(values)}


def _first_and_last(values: Sequence[float], options: argparse.Namespace) -> list[float]:
    """Medians of the first window after warming up, of the middle one and of the last."""
    window = min(60, options.seconds // 4)
    middle = (options.warm_s + options.seconds - window) // 2
    starts = (options.warm_s, middle, options.seconds - window)
    return [float(np.median(values[start : start + window])) for start in starts]


def checks_of(database: str, of: dict[str, Any]) -> list[Check]:
    """The figures against their goals."""
    made = [
        Check(f"{database}: records lost", of["lost"], 0, "<="),
        Check(f"{database}: records written again", of["written_again"], 0, "<="),
        Check(f"{database}: rejected messages", of["rejected_messages"], 0, "<="),
        Check(f"{database}: event → row p99, s", of["latency_s"]["p99"], GOAL_S, "<="),
    ]
    for name, (first, _, last) in of["memory_mib"].items():
        bound = first * GROWTH + GROWTH_MIB
        made.append(Check(f"{database}: memory of {name} in the end, MiB", last, bound, "<="))
    return made


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures for people."""
    return "\n".join(line for name, of in results.items() for line in _lines(name, of))


def _lines(database: str, of: dict[str, Any]) -> Iterator[str]:
    waits, planned = of["latency_s"], of["segments"]
    share = planned.get("controller", 0) / max(1, sum(planned.values()))
    yield (
        f"{database}: {of['sent']:,} records sent, {of['rows']:,} rows, {of['written_again']} "
        f"written again; {of['steps']:,} whole steps, {of['finished']} runs finished"
    )
    yield (
        f"  event → row p50 {waits['p50']:.3f} s, p95 {waits['p95']:.3f}, p99 {waits['p99']:.3f}, "
        f"longest {waits['max']:.3f} ({of['latencies']:,} rows; while warming up longest "
        f"{of['latency_warming_up_s']['max']:.3f}); sent up to {of['late_s']:.3f} s late; at most "
        f"{of['ingest_lag']:,} entries waited"
    )
    yield f"  controllers planned {share:.1%} of {sum(planned.values()):,} segments"
    reads = ", ".join(f"{name} {1e3 * took['p95']:.0f} ms" for name, took in of["rest_s"].items())
    yield f"  REST p95: {reads}; {of['events']:,} events of one run"
    for name, (first, middle, last) in of["memory_mib"].items():
        cores = f", {of['cpu_cores'][name]:.2f} cores" if name in of["cpu_cores"] else ""
        yield f"  {name}: {first:.0f} → {middle:.0f} → {last:.0f} MiB{cores}"


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=int, default=600, help="steps of each rank")
    made.add_argument("--runs", type=int, default=125)
    made.add_argument("--ranks", type=int, default=8, help="of each run")
    made.add_argument("--processes", type=int, default=2, help="that the runs are spread over")
    made.add_argument("--piped", action="store_true", help="a run's ranks send together")
    made.add_argument("--warm-s", type=int, default=60, help="at first, left out of the figures")
    made.add_argument("--database", choices=("sqlite", "postgres", "both"), default="sqlite")
    options = made.parse_args()
    if options.quick:
        options.seconds, options.warm_s = 60, 20
    results: dict[str, dict[str, Any]] = {}
    if options.database != "postgres":
        results["sqlite"] = measure(options, None)
    if options.database != "sqlite":
        server = Postgres(fsync=True).start()
        try:
            results["postgres"] = measure(options, server.database())
        finally:
            server.stop()
    names = ("seconds", "runs", "ranks", "processes", "piped", "warm_s")
    config = {name: getattr(options, name) for name in names}
    config["emulated"] = "what ranks compute; their processes are threads of `processes` processes"
    config["load_of_the_machine"] = psutil.getloadavg()
    checks = [check for name, of in results.items() for check in checks_of(name, of)]
    finish(options, config, results, checks, table(results))


if __name__ == "__main__":
    main()
