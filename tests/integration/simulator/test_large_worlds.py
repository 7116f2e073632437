"""A run of thousands of workers: what REST shows of it is bounded, and right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.node.client import Client
from paceline.wire.bus import connect
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.broadcast import Broadcast, register
from paceline_backend.store import Store, reads, runs
from support.leading import ingest, working
from support.waiting import until
from support.web import serving

WORLD, STEPS, EVERY = 2_500, 12, 3
V1 = "/api/v1"


@pytest.fixture
def client(tmp_path: Path, bus_url: str) -> Iterator[tuple[httpx.Client, str]]:
    """A server that was shown a simulation of `WORLD` workers, and the run's path."""
    scenario = Scenario.of(
        {
            "name": "large",
            "workers": WORLD,
            "global_batch": 2 * WORLD,
            "steps": STEPS,
            "sizes": {"distribution": "uniform", "mean": 10, "dif": 2, "samples": 40_000},
            "devices": {"unit_s": 1e-2},
        }
    )
    with (
        Store.open(f"sqlite:///{tmp_path / 'large.db'}") as store,
        serving(store, bus_url) as http,
        Client(str(http.base_url)) as server,
        connect(bus_url) as bus,
        working(ingest(store, bus_url)),
    ):
        run = register(server, scenario, "large.yaml")
        for _ in Broadcast(Simulation.of(scenario), run, bus, server, time.time()).segments():
            pass
        until(lambda: runs.get(store, run)["state"] == "finished", "all is stored")
        yield http, f"{V1}/runs/{run}"


def test_shows_each_third_rank(
    client: tuple[httpx.Client, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, path = client
    shown = list(range(0, WORLD, EVERY))
    run = http.get(path).json()
    assert (run["world"], run["step"], run["emulated"]) == (WORLD, STEPS - 1, None)

    new = http.get(f"{path}/view", params={"since": STEPS - 4}).json()
    assert new["steps"]["step"] == new["heat"]["step"] == list(range(STEPS - 3, STEPS))
    assert new["heat"]["world"] == WORLD

    table = http.get(f"{path}/worker-steps").json()
    assert table["ranks"] == shown
    asked = http.get(f"{path}/worker-steps", params={"ranks": "1,2,3"}).json()
    assert asked["ranks"] == [1, 2, 3]
    assert asked["compute_s"][2] == table["compute_s"][1], "rank 3, named or not"

    workers = http.get(f"{path}/workers", params={"last": 1000}).json()
    assert [worker["rank"] for worker in workers] == list(range(WORLD))
    assert workers[3]["compute_s"] == pytest.approx(sum(asked["compute_s"][2]) / STEPS)
    assert {worker["missing"] for worker in workers} == {0}
    assert {worker["steps"] for worker in workers} == {STEPS}

    coverage = http.get(f"{path}/coverage").json()
    assert coverage["epochs"][0]["used"] == 8 * 2 * WORLD

    monkeypatch.setattr(reads, "_SHOWN_CELLS", 4 * WORLD)
    table = http.get(f"{path}/worker-steps").json()
    assert (table["ranks"], table["step"]) == (shown, [0, 4, 8])
    asked = http.get(f"{path}/worker-steps", params={"ranks": "1"}).json()
    assert asked["step"] == list(range(STEPS)), "named: all steps"
