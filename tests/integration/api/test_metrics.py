"""`/metrics`: what it says, that it agrees with REST, and that the documentation lists it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families

from paceline.wire import StepBatch
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.insight import figures
from paceline_backend.server.heartbeat import Beat, beat
from paceline_backend.store import Store, telemetry
from support.records import add_run, adopted, hello, record

ROOT = Path(__file__).parents[3]
OPERATING = ROOT / "docs" / "operating.md"
DOCKER = ROOT / "docker"

Samples = dict[tuple[str, str], float]  # (name, value of the label) → value


def names(text: str) -> set[str]:
    """What queries call the metrics of an answer."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }


def samples(client: httpx.Client) -> Samples:
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


@pytest.fixture
def trained(store: Store) -> Iterator[str]:
    """A run that trains: two ranks, of which the second is slower, and four steps planned."""
    add_run(store, "r", state="running")
    steps = StepBatch([record(step, rank) for step in range(4) for rank in (0, 1)])
    plans = [adopted(seq, 2 * seq) for seq in range(2)]
    telemetry.write(store, [("r", message) for message in (hello(), *plans, steps)])
    yield "r"


def test_figures_of_a_run_are_those_of_rest(client: httpx.Client, trained: str) -> None:
    seen = {name: value for (name, label), value in samples(client).items() if label == trained}
    url = f"/api/v1/runs/{trained}"
    row, steps = client.get(url).json(), client.get(f"{url}/steps").json()
    slowest = max(client.get(f"{url}/workers").json(), key=lambda rank: rank["slowest_share"])
    coverage = client.get(f"{url}/coverage").json()
    plans = [segment["plan_s"] for segment in client.get(f"{url}/segments").json()]
    assert seen == pytest.approx(
        {
            "paceline_run_step": row["step"],
            "paceline_run_epoch": row["epoch"],
            "paceline_run_step_seconds": sum(steps["step_s"]) / 4,
            "paceline_run_se": sum(steps["se"]) / 4,
            "paceline_run_waste": sum(steps["waste"]) / 4,
            "paceline_run_slowest_rank": slowest["rank"],
            "paceline_run_slowest_share": slowest["slowest_share"],
            "paceline_run_plan_seconds": sum(plans) / len(plans),
            "paceline_run_coasting": 0.0,
            "paceline_run_hung_seconds": 0.0,
            "paceline_run_coverage_exact": float(coverage["exact"]),
            "paceline_run_dropped_samples": coverage["dropped"],
            "paceline_run_lost_records": row["dropped"],
        }
    )
    assert slowest["rank"] == 1


def test_only_active_runs_have_series(
    client: httpx.Client, store: Store, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, "over", state="finished")
    for number in range(4):
        add_run(store, f"young{number}", state="starting")
    monkeypatch.setattr(figures, "MOST_RUNS", 3)
    runs = {label for (name, label) in samples(client) if name == "paceline_run_lost_records"}
    assert runs == {"young1", "young2", "young3"}


def test_coverage_is_read_for_few_runs_at_a_time(store: Store) -> None:
    for number in range(5):
        add_run(store, f"r{number}", state="running")
        steps = StepBatch([record(0, rank) for rank in (0, 1)])
        telemetry.write(store, [(f"r{number}", m) for m in (hello(), adopted(0, 0), steps)])
    now = 0.0
    reading = figures.Figures(store, lambda: now)
    known = lambda: sum(run.coverage_exact is not None for run in reading.active())  # noqa: E731
    assert known() == 3
    assert known() == 5
    telemetry.write(store, [("r0", StepBatch([record(1, 0), record(1, 1)]))])
    assert known() == 5


def test_what_causes_cost_is_that_of_the_kept_verdict(client: httpx.Client, store: Store) -> None:
    """Rank 1 computes 3 × slower: one kind, one culprit."""
    add_run(store, "slow", state="running", nproc=3, attempt=0)
    rows = [
        record(step, rank, compute_s=0.3 if rank == 1 else 0.1, step_s=0.31)
        for step in range(60)
        for rank in range(3)
    ]
    telemetry.write(store, [("slow", hello(world=3)), ("slow", StepBatch(rows))])
    assert ("paceline_run_cause_share", "nodeslow") not in samples(client), "nothing is kept yet"
    assert FleetWatch(store, "worker").look(threading.Event())
    causes = client.get("/api/v1/runs/slow/verdict").json()["causes"]
    [cause] = [cause for cause in causes if cause["kind"] == "node"]
    seen = samples(client)
    assert seen["paceline_run_cause_share", "nodeslow"] == pytest.approx(cause["share"])
    assert seen["paceline_run_cause_ranks", "nodeslow"] == 1
    assert seen["paceline_run_cause_factor", "nodeslow"] == pytest.approx(cause["factor"])


def test_leases_and_the_bus(client: httpx.Client, bus_url: str) -> None:
    with redis.Redis.from_url(bus_url) as bus:
        beat(bus, Beat("w", 1, 1, 0, None, leases_taken=3, leases_lost=1))
        seen = samples(client)
        assert seen["paceline_leases_taken_total", "w"] == 3
        assert seen["paceline_leases_lost_total", "w"] == 1
        assert seen["paceline_bus_connections", ""] >= 2  # the test's and that of the answer
        assert seen["paceline_bus_memory_bytes", ""] > 0


def test_every_metric_is_documented_and_the_reverse(client: httpx.Client) -> None:
    listed = re.findall(r"^\| `(paceline_\w+)", OPERATING.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == names(client.get("/metrics").text)


_STRING = re.compile(r'"[^"]*"')
_NAME = re.compile(r"\b[a-z]\w*\b(?!\s*\()")  # no function
_WORDS = {"by", "and", "or", "unless", "offset", "time", "on", "ignoring", "without"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)")
_BRACES = re.compile(r"\{[^}]*\}|\[[^]]*\]")


def metrics_of(query: str) -> set[str]:
    """The metrics that a PromQL query reads: names outside of labels, functions and ranges."""
    bare = _GROUPING.sub("", _BRACES.sub("", _STRING.sub("", query)))
    return set(_NAME.findall(bare)) - _WORDS


def panels() -> list[dict[str, Any]]:
    document = json.loads((DOCKER / "grafana" / "dashboards" / "paceline.json").read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DOCKER / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_name_metrics_that_exist(client: httpx.Client) -> None:
    known = names(client.get("/metrics").text) | {"up"}  # Prometheus makes `up` itself
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    alerts = [rule["expr"] for rule in rules()]
    for query in [*shown, *alerts]:
        assert metrics_of(query), query
        assert metrics_of(query) <= known, query


def test_labels_of_alerts_are_those_of_their_metrics() -> None:
    for rule in rules():
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        known = {"run"} if "paceline_run_" in rule["expr"] else {"part"}
        known |= {"kind"} if "paceline_run_cause_" in rule["expr"] else set()
        assert used <= known, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_grafana_and_prometheus_find_their_files() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
    mounts = [
        mount.split(":")
        for name in ("prometheus", "grafana")
        for mount in services[name]["volumes"]
    ]
    inside = {there: DOCKER / here for here, there, *_ in mounts if here.startswith(".")}
    for root in inside.values():
        assert any(path.is_file() for path in root.rglob("*")), root
    prometheus = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    for file in prometheus["rule_files"]:
        assert (inside["/etc/prometheus"] / Path(file).name).is_file()
    provisioning = inside["/etc/grafana/provisioning"]
    provider = yaml.safe_load((provisioning / "dashboards" / "paceline.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] in inside
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())
    uid = source["datasources"][0]["uid"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {uid}
