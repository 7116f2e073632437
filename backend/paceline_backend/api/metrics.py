"""Prometheus: read when asked, so that the figures of all web processes agree."""

from __future__ import annotations

from collections.abc import Iterator

import redis
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.wire import TELEMETRY, State
from paceline.wire.bus import connect
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.server import heartbeat
from paceline_backend.store import Store, StoreError, leases, nodes
from paceline_backend.store import runs as runs_store

router = APIRouter()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    registry = CollectorRegistry()
    bus = settings_of(request).bus
    registry.register(_ControlPlane(request.app, store_of(request), bus))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _ControlPlane(Collector):
    def __init__(self, app: FastAPI, store: Store, bus: str) -> None:
        self.app = app
        self.store = store
        self.bus = bus

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "paceline_sse_clients",
            "Open event streams of this web process",
            self.app.state.sse_clients,
        )
        up = GaugeMetricFamily("paceline_up", "Whether a part answers", labels=["part"])
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
        yield GaugeMetricFamily("paceline_controllers", "Runs under a live lease", controllers)

    def _bus(self) -> Iterator[Metric]:
        with connect(self.bus) as client:
            workers = heartbeat.beats(client)
            waiting = client.xlen(TELEMETRY)
        yield GaugeMetricFamily(
            "paceline_telemetry_waiting", "Entries on the bus that are not stored yet", waiting
        )
        yield GaugeMetricFamily("paceline_workers", "Worker processes that beat", len(workers))
        rows = CounterMetricFamily(
            "paceline_ingest_rows", "Rank steps written, repeated ones included", labels=["worker"]
        )
        dead = CounterMetricFamily(
            "paceline_ingest_dead", "Messages that could not be stored", labels=["worker"]
        )
        batches = CounterMetricFamily(
            "paceline_ingest_batches", "Transactions that stored telemetry", labels=["worker"]
        )
        lag = GaugeMetricFamily(
            "paceline_ingest_lag", "Entries not yet stored at its last commit", labels=["worker"]
        )
        last = GaugeMetricFamily(
            "paceline_ingest_last_commit_timestamp_seconds",
            "Unix time of its last commit",
            labels=["worker"],
        )
        for worker in workers:
            batches.add_metric([worker.owner], worker.batches)
            lag.add_metric([worker.owner], worker.lag)
            if worker.last_commit_at is not None:
                last.add_metric([worker.owner], worker.last_commit_at)
            rows.add_metric([worker.owner], worker.rows)
            dead.add_metric([worker.owner], worker.dead)
        yield rows
        yield from (dead, batches, lag, last)
