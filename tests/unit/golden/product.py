"""Everything that the golden tests take from the product.

When modules move or types change shape, change this file and no other of `tests/unit/golden`. The
database is not opened with `Store.open`, which refuses one whose tables differ in any way.
The recorded data stays: `described` must go on giving the plain values that it gave when the data
was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import httpx
import msgspec

from paceline import policies
from paceline_backend.api.app import create_app
from paceline_backend.insight.replay import replay
from paceline_backend.insight.whatif.forecast import forecast
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.server.settings import Settings
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.store import Store

Plain = dict[str, Any]

_NO_BUS = "redis://127.0.0.1:1/0"  # nothing listens there
_LONGEST_S = 120.0  # of a request
_TOKEN = "of-golden-tests-0123456789"
_FORECAST_STEPS = 64  # newest steps of a run that a recorded forecast rests on


def presets() -> list[str]:
    return policies.names()


def segments(scenario: Plain) -> Iterator[Plain]:
    """Simulates a scenario in virtual time; each of its segments as plain values."""
    simulation = Simulation.of(Scenario.of(scenario))
    while not simulation.finished:
        yield described(simulation.advance())


def described(trained: Any) -> Plain:
    """A trained segment as plain values: what was planned, and how long it took.

    Times are virtual, in seconds. Lists are [step][rank], but for `rounds`.
    """
    plan = trained.plan
    return {
        "attempt": trained.attempt,
        "seq": plan.seq,
        "epoch": plan.epoch,
        "first_step": plan.first_step,
        "steps": plan.steps,
        "epoch_end": plan.epoch_end,
        "policy": plan.policy,
        "version": plan.version,
        "assignment": [[part.tolist() for part in step] for step in plan.assignment.parts],
        "ett_s": plan.ett_s,
        "shares": plan.shares,
        "feedback": [list(span) for span in plan.feedback],
        "shuffled": plan.shuffled,
        "moved": plan.moved,
        "memory": plan.memory,
        "threads": plan.threads,
        "synchroniser": _synchroniser(plan.synchroniser),
        "why": plan.why,
        "begins_at": trained.begins_at,
        "started_at": trained.started_at.tolist(),
        "data_s": trained.data_s.tolist(),
        "compute_s": trained.compute_s.tolist(),
        "wait_s": trained.wait_s.tolist(),
        "communication_s": trained.communication_s.tolist(),
        "rounds": [_round(each) for each in trained.rounds],
    }


def _synchroniser(synchronisation: Any) -> Plain:
    plain: Plain = msgspec.to_builtins(synchronisation)
    return plain


def _round(each: Any) -> Plain:
    """A round of a relaxed synchroniser; its numbers are counted from the segment's first."""
    return {
        "number": each.number,
        "rank": each.rank,
        "step": each.step,
        "world": each.world,
        "contributors": each.contributors,
        "staleness": list(each.staleness),
        "dropped": each.dropped,
        "waited_s": each.waited_s,
        "reduced_s": each.reduced_s,
        "bytes": each.bytes,
        "ended_at": each.ended_at,
    }


async def answers(database: Path, paths: list[str]) -> list[httpx.Response]:
    """What the web application answers over a database; no bus answers it.

    The application runs in this process, without a socket.

    Args:
        database: its file.
        paths: to get, with their queries.
    """
    settings = Settings(_url(database), _NO_BUS, token=_TOKEN)
    headers = {"Authorization": f"Bearer {_TOKEN}"}
    with Store(settings.database) as store:
        app = create_app(store, settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            return [await _got(client, path) for path in paths]


async def _got(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """An answer; the application waits for nothing, so a request that does not end fails."""
    try:
        return await asyncio.wait_for(client.get(path), _LONGEST_S)
    except TimeoutError:
        raise AssertionError(f"GET {path} has not ended after {_LONGEST_S:g} s") from None


def replayed(database: Path, run: str) -> Plain:
    with Store(_url(database)) as store:
        return asdict(replay(store, run))


def forecast_again(database: Path, run: str) -> Plain:
    """What other presets would take, computed anew from a recorded run; however long that takes."""
    with Store(_url(database)) as store:
        answer: Plain = msgspec.to_builtins(
            forecast(store, run, steps=_FORECAST_STEPS, effort=Effort(budget_s=inf))
        )
    return answer


def _url(database: Path) -> str:
    return f"sqlite:///{database}"
