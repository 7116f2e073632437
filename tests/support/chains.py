"""A run that switches from policy to policy while it trains, and what can be said of it then."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from paceline import policies
from paceline.wire import ALLREDUCE, PLANNED
from paceline_backend.insight.replay import ReplayReport, replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, runs
from paceline_backend.store import segments as segments_store
from support import chain_script
from support.e2e import PAUSE_S, wait_for_end, wait_for_step
from support.waiting import DEADLINE_S, until

STEPS = 6  # that each policy has at least
SEED = 4  # of the model and of the data's order
# Threads act on the emulated time; ranks with one CPU thread are three tenths serial.
EMULATE = {"a_s": [5e-6, 5e-6, 7.5e-6, 1.5e-5], "b_s": [0.005] * 4, "serial": 0.3}


@dataclass(frozen=True)
class Chained:
    policies: list[str]  # as switched
    effective_steps: list[int]  # the first step of each
    planned: dict[str, int]  # by each: segments of a controller, or of rank 0
    coverage: dict[str, Any]
    steps: int
    errors: dict[int, float]  # of each all-reduced gradient, relative to the single process's
    losses: list[float]  # held-out, after each epoch
    replay: ReplayReport


def synchronous() -> list[str]:
    """The presets under which each step's gradient is that of its global batch."""
    return [name for name in policies.names() if not policies.make(name).relaxed]


def random_chain(known: Sequence[str], switches: int, seed: int) -> list[str]:
    """`bsp`, then all presets in random order, again and again; never the same twice in a row."""
    draw = random.Random(seed)
    chain = ["bsp"]
    while len(chain) <= switches:
        names = draw.sample(known, len(known))
        chain += names if names[0] != chain[-1] else names[::-1]
    return chain[: switches + 1]


def run_chain(stack: Stack, names: list[str], directory: Path, steps: int = STEPS) -> Chained:
    """Trains on four emulated ranks under one policy after the other."""
    run = _start(stack, names[0], directory)
    wait_for_plan(stack, run)
    wait_for_step(stack, run, steps)
    for number, name in enumerate(names[1:], 1):
        switch(stack, run, number, name, steps)
    (directory / "enough").touch()
    ended = wait_for_end(stack, run)

    switches = stack.api("GET", f"/runs/{run}/switches")
    segments = stack.api("GET", f"/runs/{run}/segments")
    planned = [segment["policy"] for segment in segments if segment["source"] in PLANNED]
    with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
        errors = _errors(store, run, directory)
    return Chained(
        [switch["policy"] for switch in switches],
        [switch["effective_step"] for switch in switches],
        {name: planned.count(name) for name in names},
        stack.api("GET", f"/runs/{run}/coverage"),
        ended["step"] + 1,
        errors,
        json.loads((directory / "losses").read_text()),
        again,
    )


def _start(stack: Stack, policy: str, directory: Path) -> str:
    directory.mkdir(exist_ok=True)
    run = stack.api(
        "POST",
        "/runs",
        {
            "script": chain_script.__file__,
            "args": [str(directory), str(SEED)],
            "nproc": 4,
            "policy": policy,
            "env": {"PACELINE_EMULATE": json.dumps(EMULATE)},
        },
    )
    return str(run["id"])


def _errors(store: Store, run: str, directory: Path) -> dict[int, float]:
    """Of each all-reduced gradient, relative to that of a single process over the global batch."""
    data, model = chain_script.Digits(), chain_script.network()
    rows = np.load(directory / "rows.npy")
    errors = {}
    with store.read() as connection:
        key = runs.key_of(connection, run)
        hello = runs.hello(connection, key)
        assert hello is not None
        for plan in segments_store.adopted(connection, key, hello):
            if plan.synchroniser != ALLREDUCE:
                continue
            for step, parts in enumerate(plan.assignment.parts, plan.first_step):
                parameters, gradient = torch.from_numpy(rows[step])
                vector_to_parameters(parameters, model.parameters())
                model.zero_grad()
                samples = np.concatenate(parts)
                logits = model(data.pixels[samples])
                cross_entropy(logits, data.classes[samples]).backward()
                want = chain_script.gradient(model)
                errors[step] = float((gradient - want).norm() / want.norm())
    return errors


def wait_for_plan(stack: Stack, run: str) -> None:
    """Until a controller has planned: before, the leader coasts, however many steps that takes."""

    def planned() -> bool:
        segments = stack.api("GET", f"/runs/{run}/segments")
        return any(segment["source"] == "controller" for segment in segments)

    until(planned, f"a plan of run {run}", DEADLINE_S, PAUSE_S)


def switch(stack: Stack, run: str, number: int, name: str, steps: int) -> float:
    """Switches, waits until it has so many steps; how long the switch took."""
    asked = time.monotonic()
    stack.api("POST", f"/runs/{run}/policy", {"policy": name, "by": "test"})

    def effective() -> int | None:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] == "running", now["message"]
        step: int | None = stack.api("GET", f"/runs/{run}/switches")[number]["effective_step"]
        return step

    step = until(effective, f"{name} to take effect")
    waited_s = time.monotonic() - asked
    wait_for_step(stack, run, step + steps - 1)
    return waited_s
