"""Scalability of a leader, a server and a page with 1,000 to 100,000 ranks, none of which trains.

- segment: time until all ranks have read their shards of a segment. The leader and its store are
  those of a real run. Each rank has a connection of its own, waits for its shard, reads it and
  deletes it. A thread does that for several ranks, one after the other, so the times include the
  wait for the thread.
- simulator: a run of many simulated workers through the whole control plane, as
  `paceline simulate --server` sends it, and all requests of the run's page.

The figures are for `docs/scale.md`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
from harness import Check, finish, parser, percentiles, wait
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.core.terms import Terms
from paceline.node import tokens
from paceline.node.client import Client
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.epochs import EpochSteps
from paceline.train.plan.leader import Leader
from paceline.train.plan_shard import get_shard, put_shard, shard_key
from paceline.train.profile import Limits
from paceline.train.startup import Startup, reach
from paceline_backend.server.stack import Stack
from paceline_backend.simulator import Scenario

# Number of processes that act as ranks, and number of threads of each process.
PROCESSES, THREADS = 4, 64
# Number of samples of a rank in a step, and number of steps of a segment.
PER_RANK, STEPS = 4, 4
# Number of files that a process opens in addition to its connections.
SPARE_FILES = 200
# Maximum time to measure the segments of one number of ranks, in seconds.
PATIENCE_S = 300.0
# Torch's store queries the name server for the name of each client, and blocks meanwhile. Exclude
# that from the measurement: with these options, glibc's resolver queries no server.
_NO_NAMES = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Bounds in seconds. A segment of four steps lasts 4 s if a step takes a second.
READ_S, STORED_S, ANSWER_S, OPEN_S = 4.0, 600.0, 5.0, 10.0
# Requests that the run's page sends.
PAGE = {
    "run": "",
    "newest steps": "/view?last=511",
    "workers": "/workers?last=50",
    "attribution": "/attribution",
    "whole run": "/view",
}

Part = tuple[dict[str, Any], list[Check], list[str]]


class _Timed:
    """The ranks' store, which records when the leader puts a segment's first and last shard."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.began = self.ended = 0.0

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        self.began = self.began or time.time()
        self._store.set(key, value)  # type: ignore[arg-type]
        self.ended = time.time()


def _readers(pipe: Connection, port: int, ranks: Sequence[int], segments: int) -> None:
    """Act as some ranks: connect on request, then send the times of reads, segment by segment."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    pipe.send("loaded")
    pipe.recv()
    stores = [reach(rank, "127.0.0.1", port) for rank in ranks]
    for store in stores:
        store.set_timeout(timedelta(seconds=PATIENCE_S))
    pipe.send(len(stores))
    had: SimpleQueue[tuple[int, list[float]]] = SimpleQueue()

    def read(mine: Sequence[tuple[Any, int]]) -> None:
        for segment in range(segments):
            times = []
            for store, rank in mine:
                get_shard(store, segment, rank)
                times.append(time.time())
                store.delete_key(shard_key(segment, rank))
            had.put((segment, times))

    both, count = [*zip(stores, ranks, strict=True)], min(THREADS, len(ranks))
    for first in range(count):
        threading.Thread(target=read, args=[both[first::count]], daemon=True).start()
    times: list[list[float]] = [[] for _ in range(segments)]
    for _ in range(count * segments):
        segment, of_thread = had.get()
        times[segment] += of_thread
        if len(times[segment]) == len(ranks):
            pipe.send(times[segment])


def distributed(ranks: int, segments: int) -> dict[str, Any]:
    """Return the seconds of connecting, and of planning, putting and reading segments."""
    os.environ.update(_NO_NAMES)
    most, (soft, hard) = ranks + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most:
        raise RuntimeError(f"{most:,} open files are needed, but the hard limit is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    listening = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    port = listening.getsockname()[1]
    server = TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    store = _Timed(server)
    batch = PER_RANK * ranks
    samples = batch * STEPS * (segments + 1)
    terms = Terms(samples, batch, 0, False, "samples", coast_steps=STEPS)
    sizes = np.round(np.random.default_rng(0).gamma(4.0, 100.0, samples) + 1)
    device, steps = Device(None, 0, ranks), EpochSteps(terms)
    run = RunContext(terms, Environment(), device, Limits([]), steps)
    leader = Leader(run, Startup(0, ranks, store, 0, sizes), Position())  # type: ignore[arg-type]
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for first in range(PROCESSES):
        mine, theirs = context.Pipe()
        given = (theirs, port, range(first, ranks, PROCESSES), segments + 1)
        processes.append(context.Process(target=_readers, args=given, daemon=True))
        processes[-1].start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    began = time.monotonic()
    for pipe in pipes:
        pipe.send("connect")
    for pipe in pipes:
        pipe.recv()
    rows, connected_s = [], time.monotonic() - began
    for _ in range(segments + 1):
        store.began, began_at = 0.0, time.time()
        own = leader.advance(0)
        put_shard(store, own.segment, 0, own)  # type: ignore[arg-type]
        read_at = np.concatenate([pipe.recv() for pipe in pipes])
        rows.append(
            {
                "plan_s": store.began - began_at,
                "put_s": store.ended - store.began,
                "read_s": float(read_at.max()) - began_at,
                "median rank_s": float(np.median(read_at)) - began_at,
            }
        )
    for process in processes:
        process.kill()
    counted = {name: percentiles([row[name] for row in rows[1:]], 50, 95) for name in rows[0]}
    return {"ranks": ranks, "connected_s": connected_s, **counted}


def segment(*, quick: bool) -> Part:
    """Measure segments from the leader to all ranks."""
    results, checks, lines = {}, [], []
    for ranks in (100, 1_000) if quick else (1_000, 10_000):
        of = results[str(ranks)] = distributed(ranks, 5 if quick else 20)
        read_s = of["read_s"]["p95"]
        checks.append(Check(f"{ranks} ranks: a segment read by all, p95, s", read_s, READ_S, "<="))
        lines.append(
            f"{ranks:,} ranks: the leader plans {of['plan_s']['p50']:.4f} s and puts shards "
            f"{of['put_s']['p50']:.4f} s; read by half of the ranks after "
            f"{of['median rank_s']['p50']:.3f} s, by all after {of['read_s']['p50']:.3f} s, "
            f"p95 {read_s:.3f}; connected in {of['connected_s']:.1f} s"
        )
    return results, checks, lines


def scenario(workers: int, steps: int) -> Scenario:
    """Return a scenario as uneven as CHRONICA's heterogeneous cluster."""
    sizes = {"distribution": "gamma", "mean": 45, "dif": 16, "samples": 100 * workers}
    fast = workers // 2
    factors = [{"workers": fast, "factor": 1}, {"workers": workers - fast, "factor": 2}]
    return Scenario.of(
        {
            "name": f"{workers}-workers",
            "workers": workers,
            "global_batch": 4 * workers,
            "steps": steps,
            "sizes": sizes,
            "devices": {"unit_s": 1.2e-3, "step_s": 0.005, "factors": factors, "noise": 0.02},
            "communication": {"latency_s": 1e-6, "bytes": 1e8, "bandwidth": 1.25e10},
            "policy": "paceline",
        }
    )


def opened_s(stack: Stack, run: str, last: int) -> float:
    """Return the seconds until a browser shows a run up to a step."""
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from find_chromium import find_chromium

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        signed_in = {"Authorization": f"Bearer {tokens.kept(stack.url)}"}
        page = browser.new_page(extra_http_headers=signed_in)
        began = time.perf_counter()
        page.goto(f"{stack.url}/runs/{run}")
        drawn = "last => Number(document.getElementById('page')?.dataset.drawn ?? -1) >= last"
        page.wait_for_function(drawn, arg=last, timeout=120_000)
        took_s = time.perf_counter() - began
        browser.close()
    return took_s


def simulator(*, quick: bool) -> Part:
    """Measure a run of many simulated workers, and its page."""
    workers, steps = (2_000, 20) if quick else (100_000, 100)
    with tempfile.TemporaryDirectory() as name, Stack(Path(name) / "data", 0) as stack:
        path = Path(name) / "scenario.yaml"
        path.write_text(json.dumps(scenario(workers, steps).as_dict()))
        command = [sys.executable, "-m", "paceline", "simulate", str(path), "--json"]
        began = time.perf_counter()
        said = subprocess.run([*command, "--server", stack.url], capture_output=True, check=True)
        run = json.loads(said.stdout)["run"]
        wait(stack.api, run, lambda now: now["state"] == "finished", PATIENCE_S)
        stored_s = time.perf_counter() - began
        database = sum(file.stat().st_size for file in stack.data.glob("*.db*"))
        shown_s = opened_s(stack, run, steps - 1)
        answers_s = {}
        with Client(stack.url, timeout_s=300.0) as client:
            for question, query in PAGE.items():
                began = time.perf_counter()
                client.call("GET", f"/runs/{run}{query}")
                answers_s[question] = time.perf_counter() - began
    rows_s = workers * steps / stored_s
    results = {"stored_s": stored_s, "rows_per_s": rows_s, "database_bytes": database}
    results |= {"opened_s": shown_s, "answers_s": answers_s}
    checks = [
        Check("simulated and stored, s", stored_s, STORED_S, "<="),
        Check("slowest answer to the page, s", max(answers_s.values()), ANSWER_S, "<="),
        Check("its page shows the last step after, s", shown_s, OPEN_S, "<="),
    ]
    line = (
        f"{workers:,} workers × {steps} steps: {rows_s:,.0f} rows a second, stored after "
        f"{stored_s:.1f} s; database {database / 2**20:,.0f} MiB; page in a browser after "
        f"{shown_s:.2f} s; answers, s: "
        + ", ".join(f"{name} {took:.2f}" for name, took in answers_s.items())
    )
    return results, checks, [line]


PARTS = {"segment": segment, "simulator": simulator}


def main() -> None:
    """Run the benchmark."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument(
        "--part", choices=PARTS, action="append", help="run only this part; may be repeated"
    )
    options = made.parse_args()
    config: dict[str, Any] = {"load_of_the_machine": psutil.getloadavg()}
    results: dict[str, Any] = {}
    checks: list[Check] = []
    lines: list[str] = []
    for name in options.part or PARTS:
        results[name], more, text = PARTS[name](quick=options.quick)
        checks += more
        lines += text
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
