"""What ranks have been doing for long: the newest of each rank counts, while it is fresh."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from paceline.wire import LongPhase, Message, Phase, StepBatch
from paceline_backend.control.checks import Checks
from paceline_backend.insight import hangs
from paceline_backend.store import Store, StoreRefusedError, schema, telemetry
from paceline_backend.store.telemetry import phases
from support.records import add_run, hello, record
from support.web import serving


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def long_phase(rank: int, step: int, phase: Phase, at: float, **changes: Any) -> LongPhase:
    given = {"attempt": 0, "since_s": 40.0, **changes}
    return LongPhase(rank=rank, step=step, phase=phase, at=at, **given)


def fresh(store: Store, run: int) -> dict[int, tuple[int, str]]:
    with store.read() as connection:
        standing = phases.current(connection, run, hangs.PHASE_FRESH_S)
    return {rank: (each.step, each.phase) for rank, each in standing.phases.items()}


def steps(*numbers: int) -> StepBatch:
    return StepBatch([record(rank=rank, step=step) for step in numbers for rank in range(2)])


def test_the_newest_of_each_rank_counts(store: Store) -> None:
    run = add_run(store, "r")
    write(store, hello(), long_phase(0, 3, Phase.SYNC, 20.0))
    write(store, long_phase(0, 2, Phase.DATA, 10.0), long_phase(1, 3, Phase.DATA, 21.0))
    assert fresh(store, run) == {0: (3, "sync"), 1: (3, "data")}
    write(store, long_phase(1, 4, Phase.COMPUTE, 31.0))
    assert fresh(store, run) == {0: (3, "sync"), 1: (4, "compute")}


def test_what_is_over_does_not_count(store: Store) -> None:
    """A later step has ended, a later attempt began, or it was heard long ago."""
    run = add_run(store, "r")
    write(store, hello(), long_phase(0, 1, Phase.DATA, 20.0), long_phase(1, 1, Phase.SYNC, 20.0))
    write(store, steps(0))
    assert fresh(store, run) == {0: (1, "data"), 1: (1, "sync")}
    write(store, steps(1))
    assert fresh(store, run) == {0: (1, "data")}  # the next step's batch
    write(store, steps(2))
    assert fresh(store, run) == {}
    write(store, long_phase(0, 3, Phase.SYNC, 30.0))
    assert fresh(store, run) == {0: (3, "sync")}
    with store.write() as connection:
        table = schema.long_phases
        connection.execute(sa.update(table).values(heard_at=table.c.heard_at - hangs.PHASE_FRESH_S))
    assert fresh(store, run) == {}
    write(store, long_phase(0, 3, Phase.SYNC, 40.0), hello(attempt=1))
    assert fresh(store, run) == {}


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"rank": 2}, "rank 2 is out of range"),
    ({"rank": -1}, "rank"),
    ({"step": -2}, "step"),
    ({"since_s": float("nan")}, "since_s"),
    ({"at": -1.0}, "at"),
    ({"attempt": 40_000}, "attempt"),
]


def test_nonsense_is_refused(store: Store) -> None:
    add_run(store, "r")
    write(store, hello())
    for changes, why in NONSENSE:
        given = {"rank": 0, "step": 3, "phase": Phase.SYNC, "at": 20.0, **changes}
        with pytest.raises(StoreRefusedError, match=why):
            write(store, long_phase(**given))
        [reason] = Checks(store).reasons([("r", long_phase(**given))])
        assert reason is not None
        assert why in reason


def test_rest_tells_who_waits_for_whom(store: Store, bus_url: str) -> None:
    add_run(store, "r", state="running")
    write(store, hello(), steps(0, 1))
    write(store, long_phase(0, 2, Phase.SYNC, 50.0), long_phase(1, 1, Phase.DATA, 50.0))
    with serving(store, bus_url) as web:
        answer = get(web, "r")
        assert answer["words"].endswith("It waits for rank 1, which is waiting for a batch.")
        assert [answer[name] for name in ("hung", "step", "waiting", "holding")] == [
            True,
            1,
            [0],
            [1],
        ]
        assert answer["phases"][1] == {"rank": 1, "step": 1, "phase": "data", "since_s": 40.0}
        assert get(web, "r?after_s=41")["hung"] is False
        write(store, steps(2))
        assert get(web, "r") | {"expected_s": 0} == {
            "hung": False,
            "since_s": 0,
            "expected_s": 0,
            "step": 2,
            "phases": [],
            "waiting": [],
            "holding": [],
            "silent": [],
            "words": "",
        }


def get(web: httpx.Client, run: str) -> dict[str, Any]:
    run, _, query = run.partition("?")
    answer = web.get(f"/api/v1/runs/{run}/hang?{query}")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown
