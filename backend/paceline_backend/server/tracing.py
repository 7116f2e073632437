"""Optional OpenTelemetry: spans and metrics of requests, of ingest batches and of plans.

The standard ``OTEL_…`` variables configure the exporters. If none of these variables is set, or the
extra `otel` is missing, nothing is measured. FastAPI itself creates the spans of requests.

    tracing.configure("worker")
    with tracing.now().batch(entries=12) as batch:
        batch.set_attribute("rows", 40)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider, Span, TracerProvider

from paceline.core.version import __version__

log = logging.getLogger(__name__)

# A process that ends does not wait longer than this for its threads.
_THREADS_END_S = 1.0
_HTTP = "http/protobuf"
# Protocol of an exporter → name of the exporter's entry point.
_EXPORTERS = {_HTTP: "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Observed:
    """OpenTelemetry instruments with which this process measures ingest batches and plans."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        self.tracers = tracers
        self.meters = meters
        self._tracer = tracers.get_tracer("paceline", __version__)
        meter = meters.get_meter("paceline", __version__)
        self._batch_s = meter.create_histogram("paceline.ingest.batch.duration", unit="s")
        self._entries = meter.create_counter("paceline.ingest.entries", unit="{entry}")
        self._plan_s = meter.create_histogram("paceline.plan.duration", unit="s")

    @contextmanager
    def batch(self, entries: int) -> Iterator[Span]:
        """Measure one ingest batch with this number of entries from the bus."""
        began = time.perf_counter()
        with self._tracer.start_as_current_span("ingest", attributes={"entries": entries}) as span:
            yield span
        self._batch_s.record(time.perf_counter() - began)
        self._entries.add(entries)

    @contextmanager
    def plan(self, run: str, policy: str) -> Iterator[Span]:
        """Measure one plan."""
        began = time.perf_counter()
        attributes = {"run": run, "policy": policy}
        with self._tracer.start_as_current_span("plan", attributes=attributes) as span:
            yield span
        self._plan_s.record(time.perf_counter() - began, {"policy": policy})


_now = Observed(NoOpTracerProvider(), NoOpMeterProvider())


def now() -> Observed:
    """Return the instruments of this process."""
    return _now


@contextmanager
def using(observed: Observed) -> Iterator[None]:
    """Replace the instruments of this process until the block ends."""
    global _now
    before, _now = _now, observed
    try:
        yield
    finally:
        _now = before


def configure(part: str) -> None:
    """Start measuring if the environment configures an exporter.

    The service is called ``paceline-PART`` unless the environment gives another name. Errors are
    only logged: the server works without OpenTelemetry.
    """
    global _now
    names = {signal: _exporter(signal) for signal in ("TRACES", "METRICS")}
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(names.values()):
        return
    try:
        _now = Observed(*_providers(names, part))
    except ImportError as error:
        log.warning("OTEL_… variables are ignored: install paceline[otel] (%s)", error)
    except Exception as error:
        # If a variable is wrong, an exporter raises an error of its own class.
        log.warning("OTEL_… variables are ignored: %s: %s", type(error).__name__, error)


def end() -> None:
    """Export all pending spans and metrics.

    Forked processes must call this, because they run no exit handlers.
    """
    for provider in (_now.tracers, _now.meters):
        shutdown = getattr(provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def end_soon(code: int) -> None:
    """Call `end`, and end the process with this code even if requests still block threads.

    At exit, Python waits for such threads without a limit.
    """
    end()
    last = threading.Timer(_THREADS_END_S, os._exit, (code,))
    last.daemon = True
    last.start()


def _exporter(signal: str) -> str | None:
    """Return the entry point of a signal's exporter; None: the signal is not exported."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    asked = "otlp" if any(map(os.environ.get, endpoints)) else "none"
    name = os.environ.get(f"OTEL_{signal}_EXPORTER") or asked
    if name != "otlp":
        return None if name == "none" else name
    specific = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
    protocol = specific or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _HTTP
    return _EXPORTERS.get(protocol, protocol)


def _providers(names: dict[str, str | None], part: str) -> tuple[TracerProvider, MeterProvider]:
    from opentelemetry.sdk import metrics, trace
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in os.environ
    service = {} if named else {"service.name": f"paceline-{part}"}
    resource = Resource.create({"service.version": __version__, **service})
    tracers: TracerProvider = NoOpTracerProvider()
    if names["TRACES"] is not None:
        made = trace.TracerProvider(resource=resource)
        made.add_span_processor(BatchSpanProcessor(_loaded("traces", names["TRACES"])))
        tracers = made
    meters: MeterProvider = NoOpMeterProvider()
    if names["METRICS"] is not None:
        reader = PeriodicExportingMetricReader(_loaded("metrics", names["METRICS"]))
        meters = metrics.MeterProvider([reader], resource=resource)
    return tracers, meters


def _loaded(signal: str, name: str) -> Any:
    group = f"opentelemetry_{signal}_exporter"
    for entry in entry_points(group=group, name=name):
        return entry.load()()
    raise ImportError(f"no OpenTelemetry exporter is named {name}")
