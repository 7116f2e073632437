"""Screenshots for the five-second test: what does a run's page say at a glance?

Twelve runs are stored as ranks would report them, from simulated training. The page of each is
photographed at 1440 × 900, without scrolling, in an order that nobody can guess. Somebody who has
seen neither this file nor the runs answers four questions from each picture alone: is the run
healthy, who or what holds it up, what does that cost, and what is to be done. The key of the
pictures is written beside them, for whoever compares the answers.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa
from harness import parser
from playwright.sync_api import Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from find_chromium import find_chromium

from paceline.wire import (
    Adopted,
    LongPhase,
    Message,
    NodeState,
    Phase,
    RunState,
    State,
    StepBatch,
    StepRecord,
)
from paceline_backend.insight import hangs
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.broadcast import records
from paceline_backend.store import Store, schema, telemetry
from support.records import add_run
from support.web import SIGNED_IN, serving

WIDTH, HEIGHT = 1440, 900
SETTLED_S = 8.0  # after the page is there: verdict, tiles and charts come later
FORECAST_S = 90.0  # a forecast takes so long at most
# True when the banner's sentence is there, and its forecast if it asks for one.
TOLD = """() => {
  const title = document.getElementById("verdict-title").textContent;
  const forecast = document.getElementById("whatif-words").textContent;
  if (/^(Looking|The first verdict|…)/.test(title)) return false;
  return !/^(Held up|To watch)/.test(title) || !/^$|^Simulating/.test(forecast);
}"""
NODES = ("gpu-b1", "gpu-b2")


@dataclass(frozen=True)
class Glance:
    """A run of the test.

    Args:
        name: of the scenario, for the key.
        truth: what a reader should find.
        scenario: fields that differ from a healthy run's.
        devices: fields of `devices` that do.
        ended: how it ended; None: it trains.
        silent_s: so long ago its last step ended.
        coasting: no controller has planned its last 60 steps.
        hung: the rank that the others wait for in a step that does not end.
    """

    name: str
    truth: str
    scenario: dict[str, Any] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    ended: RunState | None = None
    silent_s: float = 0.5
    coasting: bool = False
    hung: int | None = None


def _slow(ranks: list[int], factor: float, first: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "slowdowns": [
            {"ranks": ranks, "factor": factor, "first_step": first, "steps": 5_000} | more
        ]
    }


_FAILURE = (
    "Rank 3 on gpu-b1: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    '  File "train.py", line 88, in forward\n'
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
)
GLANCES = (
    Glance("healthy", "nothing holds it up"),
    Glance(
        "slow node",
        "ranks 4 to 7, all of gpu-b2, compute 1.9 × slower since step 300",
        devices=_slow([4, 5, 6, 7], 1.9, 300),
    ),
    Glance(
        "data skew",
        "batches differ by the sizes of their samples; no rank is slow",
        scenario={"sizes": {"distribution": "lognormal", "mean": 40, "dif": 120, "samples": 6_400}},
    ),
    Glance(
        "periodic pause",
        "rank 2 pauses for 12 steps' time in each 40th step",
        devices=_slow([2], 12.0, 30, steps=1, every=40),
    ),
    Glance(
        "slow input",
        "rank 5 waits 0.2 s for its data loader in each step",
        devices={"data_s": [0.002] * 5 + [0.2] + [0.002] * 2},
    ),
    Glance(
        "network",
        "the reduction takes most of each step",
        scenario={"communication": {"fixed_s": 0.5}},
    ),
    Glance("hung rank", "all wait for rank 6 since two minutes", silent_s=120.0, hung=6),
    Glance(
        "group of 512",
        "ranks 512 to 1,023 compute 1.8 × slower",
        scenario={"workers": 1_024, "global_batch": 8_192, "steps": 120},
        devices=_slow([*range(512, 1_024)], 1.8, 40),
    ),
    Glance("coasting", "nobody plans: ranks train on with the last known shares", coasting=True),
    Glance(
        "failed",
        "it failed: rank 3 ran out of memory",
        ended=RunState(State.FAILED, 0.0, "gpu-b1", 0, 1, _FAILURE),
    ),
    Glance(
        "ended",
        "it has finished; rank 1 was 2.5 × slower from the start",
        devices=_slow([1], 2.5),
        ended=RunState(State.FINISHED, 0.0, "gpu-b1", 0, 0),
    ),
    Glance(
        "two causes",
        "rank 3 computes 1.8 × slower since step 200, and the reduction takes a third of the step",
        scenario={"communication": {"fixed_s": 0.16}},
        devices=_slow([3], 1.8, 200),
    ),
)


def messages(glance: Glance, now: float) -> list[Message]:
    """What a run's leader, agents and ranks report up to now."""
    plain: dict[str, Any] = {
        "name": "speech-large",
        "workers": 8,
        "global_batch": 64,
        "steps": 600,
        "sizes": {"distribution": "normal", "mean": 40, "dif": 1, "samples": 6_400},
        "devices": {"unit_s": 0.0005, "step_s": 0.02, "noise": 0.02} | glance.devices,
        "communication": {"fixed_s": 0.03},
        "policy": "bsp",
        "seed": 5,
    }
    simulation = Simulation.of(Scenario.of(plain | glance.scenario))
    hello = simulation.hello
    segments = []
    while not simulation.finished:
        segments.append(simulation.advance())
    began = now - glance.silent_s - simulation.now
    world = hello.world
    placement = [NODES[2 * rank // world] for rank in range(world)]
    sent: list[Message] = [
        RunState(State.STARTING, began - 5, NODES[0]),
        msgspec.structs.replace(hello, started_at=began, placement=placement),
        RunState(State.RUNNING, began, NODES[0]),
    ]
    coasted = simulation.step - 60 if glance.coasting else simulation.step
    for trained in segments:
        segment = trained.segment
        if segment.first_step >= coasted:
            segment = msgspec.structs.replace(segment, source="coast")
        sent.append(Adopted(0, segment, began + trained.begins_at))
        columns = records(trained, slice(0, len(trained.step_s)), 0, began)
        loss = 2.5 * np.exp(-np.array(columns["step"]) / 400) + 0.3
        columns["loss"] = loss.tolist()
        names = [*columns]
        rows = [
            StepRecord(**dict(zip(names, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]
        sent.append(StepBatch(rows))
    for node in NODES:
        sent.append(NodeState(node, node, 32, 2**37, [], now, "0.1.0", []))
    if glance.hung is not None:
        sent += [
            LongPhase(
                0,
                rank,
                simulation.step,
                Phase.COMPUTE if rank == glance.hung else Phase.SYNC,
                glance.silent_s - 1,
                now,
            )
            for rank in range(world)
        ]
    ending = glance.ended or RunState(State.RUNNING, now, NODES[0])
    sent.append(msgspec.structs.replace(ending, at=now))
    return sent


def keep(store: Store, glance: Glance, run: str) -> float:
    """Stores a run of the test; returns the Unix time until which it is told."""
    world = glance.scenario.get("workers", 8)
    now = time.time()
    key = add_run(store, run, nproc=world, name="speech-large", policy="bsp", created_at=now - 400)
    first = {"policy": "bsp", "parameters": {}, "requested_at": now - 400, "requested_by": "start"}
    with store.write() as connection:
        connection.execute(sa.insert(schema.switches).values(run=key, version=0, **first))
        if not glance.coasting:
            lease = {"owner": "planner-1", "expires_at": now + 3600}
            connection.execute(sa.insert(schema.leases).values(run=key, **lease))
    for message in messages(glance, now):
        telemetry.write(store, [("" if isinstance(message, NodeState) else run, message)])
    return now


def photograph(store: Store, web_url: str, page: Page, glance: Glance, run: str, to: Path) -> None:
    """Stores a run, opens its page and keeps the picture.

    The browser's clock stands still at the run's newest word, however long storing it has taken.
    """
    page.clock.set_fixed_time(keep(store, glance, run))
    page.goto(f"{web_url}/runs/{run}")
    page.locator("#connection-status", has_text=re.compile("live|ended|over")).wait_for(
        timeout=120_000
    )
    page.wait_for_timeout(1_000 * SETTLED_S)
    with suppress(PlaywrightTimeout):  # the picture then shows that there is none
        page.wait_for_function(TOLD, timeout=1_000 * FORECAST_S)
    page.wait_for_timeout(1_500)
    page.screenshot(path=to)


def main() -> None:
    """Makes the pictures and their key."""
    asking = parser(__doc__)
    asking.add_argument(
        "--out", type=Path, default=Path("glance"), help="a folder for the pictures"
    )
    asking.add_argument("--only", help="the scenario of this name")
    asking.add_argument("--dark", action="store_true", help="with the dark theme")
    asking.add_argument("--seed", type=int, default=0, help="of the pictures' order")
    options = asking.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in GLANCES if options.only in (None, each.name)]
    order = np.random.default_rng(options.seed).permutation(len(chosen))
    key = {}
    hangs.FRESH_S = math.inf  # the ranks of a hung run would say again and again what they do
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        store = held.enter_context(Store.open(f"sqlite:///{folder / 'paceline.db'}"))
        bus = held.enter_context(EmbeddedBus(folder / "bus"))
        web = held.enter_context(serving(store, bus.url))
        playwright = held.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        held.callback(browser.close)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            extra_http_headers=SIGNED_IN,
            color_scheme="dark" if options.dark else "light",
        )
        for number, at in enumerate(order):
            glance, name = chosen[at], f"{number:02d}"
            run = f"r-{number:02d}4c81e"
            photograph(
                store, str(web.base_url).rstrip("/"), page, glance, run, options.out / f"{name}.png"
            )
            key[name] = {"scenario": glance.name, "truth": glance.truth}
    (options.out / "key.json").write_text(json.dumps(key, indent=2))


if __name__ == "__main__":
    main()
