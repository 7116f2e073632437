"""MLflow's tracking server beside ingest: how many rows of steps a second it stores, at its best.

``mlflow server`` keeps metrics in SQLite. Clients in threads call `MlflowClient.log_batch` with as
many metrics as a call may have, one MLflow run for each rank. What MLflow stores with every metric
costs nothing here: rank (the run), step and time. Attempt and sequence number are left out.
So a row of a step is one metric for each of `METRICS`.

MLflow needs older packages than ours: `scripts/setup.sh bench` gives it an environment of its own.
There this file runs as the clients' program, and so imports nothing of Paceline.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = Path(sys.prefix) / "mlflow" / "bin"
METRICS = (
    *("epoch", "segment", "samples", "load", "data_s", "compute_s", "sync_s", "step_s"),
    *("ett_s", "loss", "memory_bytes", "squares", "longest"),
)
MOST = 1_000  # metrics of a call
THREADS = (1, 4, 8)  # of clients; the best rate counts
_START_S = 120.0


@dataclass(frozen=True)
class Rates:
    """What MLflow took."""

    version: str
    metrics_per_s: float
    rows_per_s: float
    threads: int  # of clients, each with a run of its own


def installed() -> bool:
    """Whether `make setup-bench` has installed MLflow."""
    return (PLACE / "mlflow").exists()


def rates(duration_s: float) -> Rates:
    """Metrics and rows per second, by the number of client threads that is best.

    Args:
        duration_s: of each number of threads.
    """
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as url:
        tried = {threads: _rate(url, threads, duration_s) for threads in THREADS}
    threads = max(tried, key=lambda count: tried[count])
    version = _output(str(PLACE / "mlflow"), "--version").split()[-1]
    return Rates(version, tried[threads], tried[threads] / len(METRICS), threads)


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    artifacts = ["--default-artifact-root", str(folder / "artifacts")]
    command = [str(PLACE / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *store, *artifacts],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{PLACE}:{os.environ['PATH']}"},
            start_new_session=True,
        )
        try:
            _wait(server, f"{url}/health", folder / "log")
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, 9)  # its workers, too
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"MLflow's server did not start:\n{log.read_text()[-1000:]}")


def _rate(url: str, threads: int, duration_s: float) -> float:
    python = str(PLACE / "python")
    return float(_output(python, __file__, url, json.dumps([threads, duration_s])))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _clients(url: str, threads: int, duration_s: float) -> float:
    """Metrics per second of so many clients; the first call of each warms up."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client: Any = MlflowClient(tracking_uri=url)
    experiment = client.create_experiment(f"ranks-{time.time_ns()}")
    rows = MOST // len(METRICS)
    ready = threading.Barrier(threads + 1)
    until = [0.0]
    counts = [0] * threads

    def work(number: int) -> None:
        own: Any = MlflowClient(tracking_uri=url)
        run = own.create_run(experiment, run_name=f"rank-{number}").info.run_id

        def log(first: int) -> int:
            at = int(1_000 * time.time())
            steps = range(first, first + rows)
            metrics = [Metric(name, 0.13 * step, at, step) for step in steps for name in METRICS]
            own.log_batch(run, metrics=metrics)
            return len(metrics)

        log(0)
        ready.wait()
        ready.wait()
        while time.perf_counter() < until[0]:
            counts[number] += log(counts[number] // len(METRICS) + rows)

    workers = [threading.Thread(target=work, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    until[0] = began + duration_s
    ready.wait()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began)


if __name__ == "__main__":
    print(_clients(sys.argv[1], *json.loads(sys.argv[2])))
