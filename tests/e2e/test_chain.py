"""A chain of switches among all presets, on four real ranks."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from paceline_backend import policies
from paceline_backend.replay import replay
from paceline_backend.stack import Stack
from paceline_backend.store import Store
from support import chain
from support.e2e import wait_for, wait_for_end, wait_for_step

pytestmark = pytest.mark.ranks

SWITCHES = 20
STEPS = 6  # that each policy has at least
# Threads act on the emulated time; ranks with one CPU thread are three tenths serial.
EMULATE = {"a_s": [2e-5, 2e-5, 3e-5, 6e-5], "b_s": [0.01] * 4, "serial": 0.3}


def random_chain(seed: int) -> list[str]:
    """Each preset in turn, in random order, again and again; never the same twice in a row."""
    draw = random.Random(seed)
    found = ["bsp"]
    while len(found) <= SWITCHES:
        names = policies.names()
        draw.shuffle(names)
        found += names if names[0] != found[-1] else names[::-1]
    return found[: SWITCHES + 1]


@pytest.mark.skip(reason="known defect: no live controller's ep4ddl segment was adopted in 60 s")
@pytest.mark.timeout(240)
def test_twenty_switches_among_all_presets(stack: Stack, tmp_path: Path) -> None:
    names = random_chain(seed=7)
    assert set(names) == set(policies.names()) or len(policies.names()) > SWITCHES
    assert all(one != next_ for one, next_ in itertools.pairwise(names))
    run = stack.api(
        "POST",
        "/runs",
        {
            "script": chain.__file__,
            "args": [str(tmp_path)],
            "nproc": 4,
            "policy": names[0],
            "env": {"PACELINE_EMULATE": json.dumps(EMULATE)},
        },
    )["id"]
    wait_for_step(stack, run, STEPS)
    for number, name in enumerate(names[1:], 1):
        stack.api("POST", f"/runs/{run}/policy", {"policy": name, "by": "test"})

        def effective(number: int = number) -> int | None:
            assert (now := stack.api("GET", f"/runs/{run}"))["state"] == "running", now["message"]
            step: int | None = stack.api("GET", f"/runs/{run}/switches")[number]["effective_step"]
            return step

        step = wait_for(f"{name} to take effect", effective)
        wait_for_step(stack, run, step + STEPS - 1)
    (tmp_path / "enough").touch()
    wait_for_end(stack, run)

    switches = stack.api("GET", f"/runs/{run}/switches")
    assert [switch["policy"] for switch in switches] == names
    effective_steps = [switch["effective_step"] for switch in switches]
    assert effective_steps == sorted(effective_steps)

    coverage = stack.api("GET", f"/runs/{run}/coverage")
    assert coverage["exact"] is True
    assert all(epoch["used"] == chain.SAMPLES for epoch in coverage["epochs"])

    # At each step, so also on both sides of each switch; float32.
    lines = (tmp_path / "errors-0").read_text().splitlines()
    errors = dict(json.loads(line) for line in lines)
    assert sorted(errors) == list(range(len(errors)))
    assert set(effective_steps) <= set(errors)
    assert max(errors.values()) <= 1e-5

    segments = stack.api("GET", f"/runs/{run}/segments")
    planned = [s for s in segments if s["source"] == "controller"]
    assert {s["policy"] for s in planned} == set(names)

    store = Store.open(f"sqlite:///{stack.data / 'paceline.db'}")
    try:
        again = replay(store, run)
    finally:
        store.close()
    assert again.first_difference is None
    assert again.identical == len(planned)
