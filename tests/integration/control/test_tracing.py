"""OpenTelemetry: spans and metrics of requests, of ingest's batches and of plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider

from paceline.wire import TELEMETRY, StepBatch
from paceline.wire.bus import connect, publish
from paceline_backend.control import ControllerManager
from paceline_backend.server import tracing
from paceline_backend.server.tracing import Observed
from paceline_backend.store import Store
from support.cluster import plaid_like
from support.leading import Leading, ingest, new_run, planning, working
from support.records import add_run, hello, record
from support.waiting import until
from support.web import serving

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Memory:
    """What was measured."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider([self.reader])

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    with tracing.using(Observed(made.tracers, made.meters)):
        yield made
    made.tracers.shutdown()
    made.meters.shutdown()


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as opened:
        yield opened


def test_requests(store: Store, bus_url: str, memory: Memory) -> None:
    add_run(store, "r")
    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with serving(store, bus_url) as client:
        assert client.get("/api/v1/runs/r", headers=parent).status_code == 200
        assert client.get("/api/v1/runs/none").status_code == 404
        assert client.get("/api/v1/runs", headers={"Authorization": "no"}).status_code == 401
        code = client.post("/api/v1/login-links").json()["path"]
        assert httpx.get(client.base_url.join(code), trust_env=False).status_code == 303
        for path in ("/healthz", "/metrics"):
            assert client.get(path).is_success
    spans = memory.named("GET /api/v1/runs/{run}")
    assert [span.attributes["http.response.status_code"] for span in spans] == [200, 404]
    assert f"{spans[0].context.trace_id:032x}" == TRACE
    everything = str([dict(span.attributes) for span in memory.spans.get_finished_spans()])
    assert "/healthz" not in everything
    assert "code=" not in everything, "a link's secret"
    statuses = {
        point.attributes.get("http.response.status_code"): point.count
        for point in memory.points("http.server.request.duration")
    }
    assert statuses[401] == 1


def test_batches_of_ingest(store: Store, bus_url: str, memory: Memory) -> None:
    add_run(store, "r")
    with working(ingest(store, bus_url)), connect(bus_url) as bus:
        publish(bus, TELEMETRY, hello(), "r")
        publish(bus, TELEMETRY, StepBatch([record(0, 0), record(0, 1)]), "r")

        def entries() -> int:
            return sum(span.attributes["entries"] for span in memory.named("ingest"))

        until(lambda: entries() == 2, "spans of both entries")
    assert sum(point.value for point in memory.points("paceline.ingest.entries")) == 2
    batches = sum(point.count for point in memory.points("paceline.ingest.batch.duration"))
    assert batches == len(memory.named("ingest"))


def test_plans(store: Store, bus_url: str, memory: Memory) -> None:
    run = new_run(store, "chronica")
    with (
        working(
            ingest(store, bus_url), planning(ControllerManager(store, bus_url, "me", lease_s=5.0))
        ),
        Leading(bus_url, run, plaid_like(860), np.full(4, 1e-5), epochs=1) as training,
    ):
        training.follow(1)
        until(lambda: memory.named("plan"), "a plan's span")
    attributes = dict(memory.named("plan")[0].attributes)
    assert attributes == {"run": run, "policy": "chronica"}
    (point,) = memory.points("paceline.plan.duration")
    assert (dict(point.attributes), point.count) == (
        {"policy": "chronica"},
        len(memory.named("plan")),
    )


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "METRICS_ENDPOINT", "PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    with tracing.using(Observed(NoOpTracerProvider(), NoOpMeterProvider())):
        yield monkeypatch
        for provider in (tracing.now().tracers, tracing.now().meters):
            if isinstance(provider, TracerProvider | MeterProvider):
                provider.shutdown()


def test_nothing_is_measured_unless_asked(bare: pytest.MonkeyPatch) -> None:
    tracing.configure("web")
    assert isinstance(tracing.now().tracers, NoOpTracerProvider)
    bare.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    bare.setenv("OTEL_SDK_DISABLED", "true")
    tracing.configure("web")
    assert isinstance(tracing.now().tracers, NoOpTracerProvider)


@pytest.mark.parametrize("name", [None, "mine"])
def test_the_environment_says_what_goes_where(bare: pytest.MonkeyPatch, name: str | None) -> None:
    bare.setenv("OTEL_TRACES_EXPORTER", "console")
    bare.setenv("OTEL_METRICS_EXPORTER", "none")
    if name is not None:
        bare.setenv("OTEL_SERVICE_NAME", name)
    tracing.configure("worker")
    tracers = tracing.now().tracers
    assert isinstance(tracers, TracerProvider)
    assert tracers.resource.attributes["service.name"] == (name or "paceline-worker")
    assert isinstance(tracing.now().meters, NoOpMeterProvider)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_endpoint_gets_both(bare: pytest.MonkeyPatch, protocol: str) -> None:
    bare.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    bare.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    bare.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing.configure("web")
    assert isinstance(tracing.now().tracers, TracerProvider)
    assert isinstance(tracing.now().meters, MeterProvider)


def test_a_wrong_variable_keeps_nobody_from_working(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    with caplog.at_level(logging.WARNING):
        tracing.configure("web")
    assert (
        "OTEL_… variables are ignored: install paceline[otel] "
        "(no OpenTelemetry exporter is named nonsense)"
    ) in caplog.text
    assert isinstance(tracing.now().tracers, NoOpTracerProvider)
