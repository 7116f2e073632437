"""A run that switches from policy to policy while it trains, and what can be said of it then."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_backend import policies
from paceline_backend.replay import ReplayReport, replay
from paceline_backend.stack import Stack
from paceline_backend.store import Store
from support import chain_script
from support.e2e import wait_for, wait_for_end, wait_for_step

STEPS = 6  # that each policy has at least
# Threads act on the emulated time; ranks with one CPU thread are three tenths serial.
EMULATE = {"a_s": [2e-5, 2e-5, 3e-5, 6e-5], "b_s": [0.01] * 4, "serial": 0.3}


@dataclass(frozen=True)
class Chained:
    """What a run did."""

    policies: list[str]  # as switched
    effective_steps: list[int]  # the first step of each
    planned: dict[str, int]  # by each: a controller's segments
    coverage: dict[str, Any]
    errors: dict[int, float]  # of each step's gradient, relative to the single process's
    replay: ReplayReport
    waits_s: list[float]  # from each request to the switch


def synchronous() -> list[str]:
    """The presets under which each step's gradient is that of its global batch."""
    return [name for name in policies.names() if not policies.make(name).relaxed]


def random_chain(switches: int, seed: int) -> list[str]:
    """`bsp`, then each of them in random order, again and again; never the same twice in a row."""
    draw = random.Random(seed)
    found = ["bsp"]
    while len(found) <= switches:
        names = synchronous()
        draw.shuffle(names)
        found += names if names[0] != found[-1] else names[::-1]
    return found[: switches + 1]


def run_chain(stack: Stack, names: list[str], directory: Path) -> Chained:
    """Trains on four emulated ranks under one policy after the other, some steps each.

    Args:
        stack: the server that it runs on.
        names: of the policies.
        directory: for the script's files.
    """
    run = stack.api(
        "POST",
        "/runs",
        {
            "script": chain_script.__file__,
            "args": [str(directory)],
            "nproc": 4,
            "policy": names[0],
            "env": {"PACELINE_EMULATE": json.dumps(EMULATE)},
        },
    )["id"]
    wait_for_step(stack, run, STEPS)
    waits_s = [switch(stack, run, number, name, STEPS) for number, name in enumerate(names[1:], 1)]
    (directory / "enough").touch()
    wait_for_end(stack, run)

    switches = stack.api("GET", f"/runs/{run}/switches")
    planned = dict.fromkeys(names, 0)
    for segment in stack.api("GET", f"/runs/{run}/segments"):
        planned[segment["policy"]] += segment["source"] == "controller"
    store = Store.open(f"sqlite:///{stack.data / 'paceline.db'}")
    try:
        again = replay(store, run)
    finally:
        store.close()
    lines = (directory / "errors-0").read_text().splitlines()
    return Chained(
        [switch["policy"] for switch in switches],
        [switch["effective_step"] for switch in switches],
        planned,
        stack.api("GET", f"/runs/{run}/coverage"),
        dict(json.loads(line) for line in lines),
        again,
        waits_s,
    )


def switch(stack: Stack, run: str, number: int, name: str, steps: int) -> float:
    """Switches, waits until it has so many steps; how long the switch took."""
    asked = time.monotonic()
    stack.api("POST", f"/runs/{run}/policy", {"policy": name, "by": "test"})

    def effective() -> int | None:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] == "running", now["message"]
        step: int | None = stack.api("GET", f"/runs/{run}/switches")[number]["effective_step"]
        return step

    step = wait_for(f"{name} to take effect", effective)
    waited_s = time.monotonic() - asked
    wait_for_step(stack, run, step + steps - 1)
    return waited_s
