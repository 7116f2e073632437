"""Probes for liveness and readiness, and metrics for Prometheus.

Metrics are read from database and bus at each request, so all web processes report the same values.
Only the metrics of event streams are those of the web process itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import redis
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from paceline.wire import State
from paceline_backend.api.rules import ANYBODY, VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.insight import costs
from paceline_backend.insight.figures import MEAN_STEPS, Figures, MonitoredRun
from paceline_backend.requests import rejected, streams
from paceline_backend.requests.streams import PROBE
from paceline_backend.server import floods, heartbeat
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, StoreError, leases, nodes
from paceline_backend.store import runs as runs_store
from paceline_backend.store.meta import Probe

log = logging.getLogger(__name__)

# State of a database or bus that does not answer or accepts no writes. The probes are public, so
# the reason is written only to the log.
_AWAY = "does not answer"

probes_router = APIRouter(dependencies=[Depends(ANYBODY)])
metrics_router = APIRouter(dependencies=[Depends(VIEWER)])


class Health(BaseModel):
    """Response of a web process that serves requests."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """States of database, bus and worker: `ok`, or the problem. The log has the reason."""

    database: str = Field(examples=["ok"])
    bus: str = Field(examples=["ok"])
    worker: str = Field(examples=["ok"])


@probes_router.get("/healthz")
def healthz() -> Health:
    """Return 200 while this process serves requests."""
    return Health()


@probes_router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(request: Request, response: Response) -> Readiness:
    """Return 200 if database and bus accept writes and a worker is alive; else 503."""
    bus, worker = _bus_and_worker(request.app.state.bus)
    ready = Readiness(database=_database(request.app.state.probe), bus=bus, worker=worker)
    if {ready.database, ready.bus, ready.worker} != {"ok"}:
        response.status_code = 503
    return ready


def _database(probe: Probe) -> str:
    problem = probe.error()
    if problem is not None:
        log.warning("not ready: %s", problem)
        return _AWAY
    return "ok"


def _bus_and_worker(client: redis.Redis) -> tuple[str, str]:
    try:
        # Test with a write, because a bus whose disk is full still answers.
        client.set(PROBE, b"", ex=60)
        workers: list[Any] = heartbeat.beats(client)
    except redis.RedisError as error:
        log.warning("not ready: the bus does not answer: %s", error)
        return _AWAY, "unknown, because the bus does not answer"
    return "ok", "ok" if workers else "no worker has sent a heartbeat in the last 10 s"


@metrics_router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
)
def metrics(request: Request) -> Response:
    """Return metrics for Prometheus."""
    registry = CollectorRegistry()
    registry.register(_ControlPlane(request.app, store_of(request)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


# Metrics per run: name, field of `MonitoredRun`, help.
_OF_RUNS = (
    ("step", "step", "Last complete step"),
    ("epoch", "epoch", "Epoch of the last complete step"),
    ("step_seconds", "step_s", f"Mean step time in seconds, over the last {MEAN_STEPS} steps"),
    ("se", "se", f"Mean straggler effect (SE) of a step, over the last {MEAN_STEPS} steps"),
    (
        "waste",
        "waste",
        f"Mean straggler waste of a step, over the last {MEAN_STEPS} steps",
    ),
    ("slowest_rank", "slowest_rank", "Rank that computed longest in most steps"),
    ("slowest_share", "slowest_share", "Share of steps in which the slowest rank computed longest"),
    ("plan_seconds", "plan_s", "Mean seconds to plan a segment, over the newest segments"),
    ("coasting", "coasting", "Share of the newest segments that the leader planned itself"),
    (
        "hung_seconds",
        "hung_s",
        "Seconds for which the run has hung without progress; 0: no hang",
    ),
    ("coverage_exact", "coverage_exact", "1: each epoch has used each sample exactly once so far"),
    ("dropped_samples", "samples_dropped", "Samples whose gradients were too old to be applied"),
    ("lost_records", "records_lost", "Telemetry records that were lost because a spool was full"),
)
# Metrics per run and kind of cause: name, field of `CauseCost`, help.
_OF_CAUSES = (
    ("cause_share", "share", "Share of the wall time that active causes of the kind cost"),
    (
        "cause_ranks",
        "culprits",
        "Number of ranks that are responsible for active causes of the kind",
    ),
    (
        "cause_factor",
        "factor",
        "Slowdown factor of the ranks that are responsible for causes of the kind",
    ),
)

# Metrics per run if there is a price: name, field of `insight.costs.of_run`, help.
_OF_COSTS = (
    ("cost", "amount", "Cost of the ranks' time in the run's steps so far"),
    ("waited_cost", "waited", "Cost of the time that the run's ranks have waited for slower ranks"),
)


class _ControlPlane(Collector):
    def __init__(self, app: FastAPI, store: Store) -> None:
        self.app = app
        self.store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "paceline_sse_clients",
            "Open event streams of this web process",
            self.app.state.streams.total,
        )
        yield CounterMetricFamily(
            "paceline_event_streams_refused",
            "Event streams that this web process refused because the client had too many",
            self.app.state.streams.refused,
        )
        up = GaugeMetricFamily(
            "paceline_up", "1: the part answers: the database or the bus", labels=["part"]
        )
        for part, families in (("database", self._database), ("bus", self._bus)):
            try:
                yield from list(families())
            except (StoreError, redis.RedisError):
                up.add_metric([part], 0)
            else:
                up.add_metric([part], 1)
        yield up

    def _database(self) -> Iterator[Metric]:
        with self.store.read() as connection:
            states = runs_store.counts(connection)
            alive = sum(node["alive"] for node in nodes.listed(connection))
            controllers = leases.held_now(connection)
        family = GaugeMetricFamily("paceline_runs", "Runs by state", labels=["state"])
        for state in State:
            family.add_metric([state], states.get(state, 0))
        yield family
        yield GaugeMetricFamily("paceline_nodes_alive", "Nodes whose agent answers", alive)
        if (free := self.store.free_share()) is not None:
            words = "Share of the database's file system that is free"
            yield GaugeMetricFamily("paceline_disk_free_share", words, free)
        yield GaugeMetricFamily(
            "paceline_controllers", "Runs that a controller plans now", controllers
        )
        yield from self._runs()

    def _costs(self, runs: Sequence[MonitoredRun]) -> Iterator[Metric]:
        settings: Settings = self.app.state.settings
        price = settings.hour_price
        known = {run.run: costs.of_run(run.totals, run.backend, price) for run in runs}
        for name, field, words in _OF_COSTS:
            labels = ["run", "currency"]
            family = GaugeMetricFamily(f"paceline_run_{name}", words, labels=labels)
            for run, cost in known.items():
                if cost is not None:
                    family.add_metric([run, cost["currency"]], cost[field])
            yield family

    def _runs(self) -> Iterator[Metric]:
        figures: Figures = self.app.state.figures
        active = figures.active()
        yield from self._costs(active)
        for name, field, words in _OF_RUNS:
            family = GaugeMetricFamily(f"paceline_run_{name}", words, labels=["run"])
            for run in active:
                if (value := getattr(run, field)) is not None:
                    family.add_metric([run.run], float(value))
            yield family
        for name, field, words in _OF_CAUSES:
            family = GaugeMetricFamily(f"paceline_run_{name}", words, labels=["run", "kind"])
            for run in active:
                for cost in run.costs:
                    if (value := getattr(cost, field)) is not None:
                        family.add_metric([run.run, cost.kind], float(value))
            yield family

    def _bus(self) -> Iterator[Metric]:
        client: redis.Redis = self.app.state.bus
        workers = heartbeat.beats(client)
        waiting = streams.waiting(client, self.store)
        info: Any = client.info("default")
        kept, ever = rejected.counts(client)
        flooded = floods.counts(client)
        yield GaugeMetricFamily(
            "paceline_telemetry_waiting", "Entries on the bus that are not stored yet", waiting
        )
        yield GaugeMetricFamily(
            "paceline_bus_connections", "Connections of the bus", info["connected_clients"]
        )
        yield GaugeMetricFamily(
            "paceline_bus_memory_bytes", "Memory that the bus uses", info["used_memory"]
        )
        yield from _refused(kept, ever, flooded)
        yield GaugeMetricFamily(
            "paceline_workers", "Worker processes with a current heartbeat", len(workers)
        )
        rows = CounterMetricFamily(
            "paceline_ingest_rows",
            "Records of ranks' steps that the worker wrote, including repeated ones",
            labels=["worker"],
        )
        batches = CounterMetricFamily(
            "paceline_ingest_batches",
            "Transactions in which the worker stored telemetry",
            labels=["worker"],
        )
        lag = GaugeMetricFamily(
            "paceline_ingest_lag",
            "Entries on the worker's streams that were not stored at its last check",
            labels=["worker"],
        )
        last = GaugeMetricFamily(
            "paceline_ingest_last_commit_timestamp_seconds",
            "Unix time of the worker's last commit",
            labels=["worker"],
        )
        taken = CounterMetricFamily(
            "paceline_leases_taken", "Runs that the worker began to plan", labels=["worker"]
        )
        lost = CounterMetricFamily(
            "paceline_leases_lost",
            "Runs that the worker no longer plans because another worker took them over",
            labels=["worker"],
        )
        for worker in workers:
            taken.add_metric([worker.owner], worker.leases_taken)
            lost.add_metric([worker.owner], worker.leases_lost)
            batches.add_metric([worker.owner], worker.batches)
            lag.add_metric([worker.owner], worker.lag)
            if worker.last_commit_at is not None:
                last.add_metric([worker.owner], worker.last_commit_at)
            rows.add_metric([worker.owner], worker.rows)
        yield rows
        yield from (batches, lag, last, taken, lost)


def _refused(kept: int, ever: int, flooded: floods.Counts) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_rejected_kept", "Rejected messages that can be listed", kept)
    yield CounterMetricFamily("paceline_rejected_messages", "Messages ever rejected", ever)
    yield GaugeMetricFamily(
        "paceline_writers_off",
        "Runs and nodes that are switched off because they flooded the bus",
        flooded.off_now,
    )
    yield CounterMetricFamily(
        "paceline_floods",
        "Number of times that a run or node was switched off because it flooded the bus",
        flooded.switched_off,
    )
    yield CounterMetricFamily(
        "paceline_flood_dropped_entries",
        "Entries that were dropped because a run or node flooded the bus",
        flooded.dropped,
    )
