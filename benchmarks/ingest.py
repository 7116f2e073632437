"""Ingest: rows per second of one consumer, and latency from an event to its committed row.

Throughput: records are on a real bus, 50 in a message or 1, and the worker's ingest process
(`IngestProcess`) ingests them all. It reads, decodes, checks, upserts, sums up the steps, commits,
publishes and acknowledges. The baseline, in the same run, is the minimum that any consumer must do:
read, decode, executemany into the same table, and acknowledge. Both have the same durability, the
same constraints and the same thresholds of the garbage collector, and neither's start-up counts:
ingest has stored rows of another run, and is suspended until all records are on the bus.

Latency: another process sends 10,000 events/s as ranks do, in one message per rank every 20 ms. An
event starts when its record is created, up to 20 ms before the record is sent. It ends when the
live stream on the bus has the message, which happens after the commit.

With ``--beside`` only the latency is measured: while another run sends the largest permitted Hello,
and while it sends a thousand messages that cannot be read.

Postgres vacuums and writes its checkpoint before each measurement, not during it.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import psutil
import redis
import sqlalchemy as sa
from harness import Check, finish, interleaved, parser

from paceline.wire import (
    INGEST_GROUP,
    Hello,
    StepBatch,
    StepRecord,
    decode,
    decode_all,
    encode,
    live,
    run_telemetry,
)
from paceline.wire.bus import connect
from paceline.wire.parts import MOST_SAMPLES, encode_hello
from paceline_backend.control.consumer import Consumer
from paceline_backend.control.ingest_process import GARBAGE, IngestProcess
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, schema, telemetry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.postgres import Postgres
from support.records import add_run

WORLD = 8
EVENTS_PER_S = 10_000
FLUSH_S = 0.02
UNREADABLE = 1_000
UNREADABLE_BYTES = 16_384
GOALS = {"sqlite": 100_000, "postgres": 60_000}
TIMES_RAW = {"sqlite": 0.6, "postgres": 1.4}
COLUMNS = (*StepRecord.__struct_fields__, "run")


def records(rank: int, steps: range, ended_at: list[float] | None = None) -> list[StepRecord]:
    """Return a rank's records of some steps."""
    return [
        StepRecord(
            attempt=0,
            rank=rank,
            seq=step,
            step=step,
            epoch=step // 1000,
            segment=step // 4,
            samples=8,
            load=361.5 + rank,
            data_s=0.0012,
            compute_s=0.1 + 0.01 * rank,
            sync_s=0.021,
            step_s=0.13,
            ended_at=ended_at[index] if ended_at else 1.7e9 + 0.13 * step,
            ett_s=0.11,
            loss=2.3,
            memory_bytes=3_000_000_000,
        )
        for index, step in enumerate(steps)
    ]


def fill(client: redis.Redis, run: str, rows: int, per_message: int) -> None:
    """Put `rows` records onto the bus, alternating between ranks."""
    per_rank = rows // WORLD
    for first in range(0, per_rank, per_message):
        pipeline = client.pipeline(transaction=False)
        for rank in range(WORLD):
            batch = StepBatch(records(rank, range(first, min(first + per_message, per_rank))))
            fields: dict[Any, Any] = dict(encode(batch, run))
            pipeline.xadd(run_telemetry(run), fields)
        pipeline.execute()


def new_run(store: Store) -> str:
    """Add a run of `WORLD` ranks that has sent its Hello, and return its id."""
    run = f"run-{time.monotonic_ns()}"
    add_run(store, run, nproc=WORLD, signed=True, created_at=time.time())
    sizes = np.ones(1000).tobytes()
    hello = Hello(0, WORLD, 64, 0, sizes, "samples", False, None, 2, 1.0, "0", "2", "cpu")
    telemetry.write(store, [(run, hello)])
    return run


@contextmanager
def ingesting(store: Store, bus_url: str) -> Iterator[psutil.Process]:
    """Ingest like the worker does; yield the ingest process as soon as it has stored rows."""
    url = store.url.render_as_string(hide_password=False)
    program = [sys.executable, __file__, "--ingest", url, bus_url]
    first = new_run(store)
    with (
        closing(connect(bus_url)) as client,
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        try:
            fill(client, first, 100 * WORLD, 50)
            wait_until_read(client, run_telemetry(first))
            yield child
        finally:
            process.stdin.close()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"ingest ended with code {process.returncode}")


def wait_until_read(client: redis.Redis, *streams: str) -> None:
    """Wait until ingest has deleted all entries of streams, which it does after their commit."""
    while any(client.xlen(stream) for stream in streams):
        time.sleep(0.01)


def ingest(database: str, bus_url: str) -> None:
    """Ingest in a separate process until standard input ends; print the PID of this process."""
    child, stop = IngestProcess(Settings(database, bus_url), "benchmark"), threading.Event()
    print(child.pid, flush=True)
    thread = threading.Thread(target=child.run, args=[stop])
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()


def settle(store: Store) -> None:
    """Let Postgres do the maintenance that would otherwise run during the next measurement."""
    if store.is_sqlite:
        return
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for upkeep in ("VACUUM ANALYZE", "CHECKPOINT"):
            connection.execute(sa.text(upkeep))


def ingest_rows(store: Store, bus_url: str, rows: int, per_message: int) -> float:
    """Measure rows per second of one ingest, which sums up every step."""
    run = new_run(store)
    settle(store)
    with closing(connect(bus_url)) as client, ingesting(store, bus_url) as process:
        process.suspend()
        fill(client, run, rows, per_message)
        began = time.perf_counter()
        process.resume()
        wait_until_read(client, run_telemetry(run))
        took_s = time.perf_counter() - began
    stored = {table: _count(store, table, run) for table in (schema.worker_steps, schema.steps)}
    if stored != {schema.worker_steps: rows, schema.steps: rows // WORLD}:
        raise RuntimeError(f"sent {rows} rows, but stored {list(stored.values())} rows and steps")
    return rows / took_s


def _count(store: Store, table: sa.Table, run: str) -> int:
    query = sa.select(sa.func.count()).select_from(table).join(schema.runs)
    with store.read() as connection:
        return int(connection.execute(query.where(schema.runs.c.id == run)).scalar_one())


def raw_rows(store: Store, bus_url: str, rows: int, per_message: int) -> float:
    """Measure rows per second of the minimum that a consumer must do with its driver."""
    run = new_run(store)
    settle(store)
    with store.read() as connection:
        query = sa.select(schema.runs.c.key).where(schema.runs.c.id == run)
        key = connection.execute(query).scalar_one()
    mark = "?" if store.is_sqlite else "%s"
    insert = (
        f"INSERT INTO worker_steps ({', '.join(COLUMNS)}) "
        f"VALUES ({', '.join([mark] * len(COLUMNS))}) ON CONFLICT DO NOTHING"
    )
    # The driver's own connection, with the settings of the store, such as its durability.
    with closing(store.engine.raw_connection()) as driver, closing(connect(bus_url)) as client:
        fill(client, run, rows, per_message)
        consumer = Consumer(client, [run_telemetry(run)], INGEST_GROUP, "raw")
        cursor = driver.cursor()
        began, done = time.perf_counter(), 0
        while done < rows:
            numbers, values = [], []
            for _, number, fields in consumer.read(500, 0.1):
                numbers.append(number)
                message: Any = decode(fields)[1]
                values += [(*msgspec.structs.astuple(record), key) for record in message.records]
            if not numbers:
                continue
            if store.is_sqlite:
                cursor.execute("BEGIN IMMEDIATE")
            cursor.executemany(insert, values)
            driver.commit()
            client.xack(run_telemetry(run), INGEST_GROUP, *numbers)
            client.xdel(run_telemetry(run), *numbers)
            done += len(values)
        return rows / (time.perf_counter() - began)


def produce(bus_url: str, run: str, duration_s: float) -> None:
    """Send `EVENTS_PER_S` as ranks do. The benchmark runs this in a separate process."""
    per_flush = round(EVENTS_PER_S * FLUSH_S / WORLD)
    ages = [FLUSH_S * (1 - (index + 1) / per_flush) for index in range(per_flush)]
    with closing(connect(bus_url)) as client:
        began = time.time()
        for flush in range(round(duration_s / FLUSH_S)):
            due = began + (flush + 1) * FLUSH_S
            time.sleep(max(0.0, due - time.time()))
            steps = range(flush * per_flush, (flush + 1) * per_flush)
            pipeline = client.pipeline(transaction=False)
            for rank in range(WORLD):
                # An event starts when it was due, so that a late producer does not hide latency.
                batch = StepBatch(records(rank, steps, [due - age for age in ages]))
                fields: dict[Any, Any] = dict(encode(batch, run))
                pipeline.xadd(run_telemetry(run), fields)
            pipeline.execute()


def largest_hello(client: redis.Redis, run: str) -> None:
    """Send the largest permitted Hello in parts."""
    sizes = np.random.default_rng(7).uniform(1, 500, MOST_SAMPLES).astype("<f8").tobytes()
    hello = Hello(0, WORLD, 64, 0, sizes, "samples", False, None, 2, 1.0, "0", "2", "cpu")
    for entry in encode_hello(hello, run):
        fields: dict[Any, Any] = {**entry}
        client.xadd(run_telemetry(run), fields)


def unreadable(client: redis.Redis, run: str) -> None:
    """Send messages that cannot be read."""
    for number in range(UNREADABLE):
        fields: dict[Any, Any] = dict(encode(StepBatch([]), run))
        fields[b"data"] = bytes([0xC1, number % 256]) * (UNREADABLE_BYTES // 2)
        client.xadd(run_telemetry(run), fields)


BESIDE = {"largest_hello": largest_hello, "unreadable": unreadable}


def beside(store: Store, bus_url: str, duration_s: float) -> dict[str, dict[str, float]]:
    """Measure latencies of a run while another run sends messages that are costly to ingest."""
    results = {}
    for name, send in BESIDE.items():
        other = new_run(store)
        with closing(connect(bus_url)) as client:
            thread = threading.Timer(duration_s / 4, send, (client, other))
            thread.start()
            p50_s, p99_s, peak = latencies(store, bus_url, duration_s, run_telemetry(other))
            thread.join()
        results[name] = {"latency_p50_s": p50_s, "latency_p99_s": p99_s, "ingest_peak_mib": peak}
    with store.read() as connection:
        stored = connection.execute(sa.select(sa.func.max(schema.runs.c.samples))).scalar_one()
    if stored != MOST_SAMPLES:
        raise RuntimeError(f"the largest Hello was not stored: {stored} samples")
    return results


def latencies(
    store: Store, bus_url: str, duration_s: float, other: str | None = None
) -> tuple[float, float, float]:
    """Return the median and 99th percentile of latencies in s, and ingest's peak memory in MiB.

    Rows are sent for `duration_s`. The measurement ends once their stream and `other` are empty.
    """
    run = new_run(store)
    settle(store)
    with closing(connect(bus_url)) as client, ingesting(store, bus_url) as process:
        producer = [sys.executable, __file__, "--produce", bus_url, run, str(duration_s)]
        subprocess.run(producer, check=True)
        wait_until_read(client, run_telemetry(run), *([] if other is None else [other]))
        peak = _peak_mib(process.pid)
        entries: Any = client.xrange(live(run))
    waits = []
    for number, fields in entries:
        committed = int(number.split(b"-")[0]) / 1000
        for message in decode_all(fields)[1]:
            records = message.records if isinstance(message, StepBatch) else []
            waits += [committed - record.ended_at for record in records]
    # Leave out the first second, in which connections and caches warm up.
    warm = waits[EVENTS_PER_S:]
    return float(np.percentile(warm, 50)), float(np.percentile(warm, 99)), peak


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def measure(store: Store, bus_url: str, quick: bool) -> dict[str, float]:
    """Return all figures of one database."""
    rows, repeats, duration_s = (240_000, 3, 4.0) if quick else (480_000, 5, 20.0)
    ways = {
        "ours": partial(ingest_rows, store, bus_url, rows, 50),
        "raw": partial(raw_rows, store, bus_url, rows, 50),
    }
    pairs = interleaved(ways, repeats)
    singly = ingest_rows(store, bus_url, rows // 10, 1)
    p50_s, p99_s, _ = latencies(store, bus_url, duration_s)
    return {
        "rows_per_s": float(np.median([pair["ours"] for pair in pairs])),
        "raw_rows_per_s": float(np.median([pair["raw"] for pair in pairs])),
        "rows_per_s_one_record_a_message": singly,
        "latency_p50_s": p50_s,
        "latency_p99_s": p99_s,
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """Return a table of the figures."""
    lines = [
        f"{'':10}{'rows/s':>12}{'raw driver':>12}{'1 a message':>13}{'p50':>10}{'p99':>10}",
    ]
    lines += [
        f"{name:10}{of['rows_per_s']:12,.0f}{of['raw_rows_per_s']:12,.0f}"
        f"{of['rows_per_s_one_record_a_message']:13,.0f}"
        f"{1000 * of['latency_p50_s']:7.1f} ms{1000 * of['latency_p99_s']:7.1f} ms"
        for name, of in results.items()
    ]
    return "\n".join(lines)


def on_both(figures: Callable[[Store, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures on SQLite and on Postgres."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedBus(Path(directory) / "bus") as bus:
        with Store.open(f"sqlite:///{directory}/paceline.db") as store:
            results = {"sqlite": figures(store, bus.url)}
        server = Postgres(fsync=True).start()
        try:
            with Store.open(server.database()) as store:
                results["postgres"] = figures(store, bus.url)
        finally:
            server.stop()
    return results


def measure_beside(options: argparse.Namespace) -> NoReturn:
    """Measure latencies while another run sends messages that are costly to ingest, and exit."""
    duration_s = 8.0 if options.quick else 20.0
    results = on_both(lambda store, bus: beside(store, bus, duration_s))
    checks = [
        Check(f"{name} event → row p99 beside {what}, s", of["latency_p99_s"], 2.0, "<=")
        for name, whats in results.items()
        for what, of in whats.items()
    ]
    lines = [
        f"{name:10}{what:15} p50 {1000 * of['latency_p50_s']:7.1f} ms, "
        f"p99 {1000 * of['latency_p99_s']:7.1f} ms, ingest at most {of['ingest_peak_mib']:.0f} MiB"
        for name, whats in results.items()
        for what, of in whats.items()
    ]
    config = {"samples": MOST_SAMPLES, "unreadable": UNREADABLE, "events_per_s": EVENTS_PER_S}
    finish(options, config, results, checks, "\n".join(lines))


def main() -> None:
    """Run the benchmark, or one of its child processes."""
    if sys.argv[1:2] == ["--produce"]:
        produce(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    if sys.argv[1:2] == ["--ingest"]:
        ingest(sys.argv[2], sys.argv[3])
        return
    made = parser(__doc__)
    made.add_argument("--beside", action="store_true", help="measure latency beside a harmful run")
    options = made.parse_args()
    gc.set_threshold(*GARBAGE)
    gc.freeze()
    if options.beside:
        measure_beside(options)
    results = on_both(lambda store, bus: measure(store, bus, options.quick))
    checks = [
        Check(f"{name} rows/s", results[name]["rows_per_s"], goal, ">=")
        for name, goal in GOALS.items()
    ]
    checks += [
        Check(
            f"{name} rows/s, times the raw driver's",
            results[name]["rows_per_s"] / results[name]["raw_rows_per_s"],
            times,
            ">=",
        )
        for name, times in TIMES_RAW.items()
    ]
    checks += [
        Check(f"{name} event → row p99, s", of["latency_p99_s"], 0.05, "<=")
        for name, of in results.items()
    ]
    config = {"world": WORLD, "events_per_s": EVENTS_PER_S, "flush_s": FLUSH_S}
    finish(options, config, results, checks, table(results))


if __name__ == "__main__":
    main()
