"""What a verdict rests on, read from the database; and the verdict on the command line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.commands.verdict import lines
from paceline.wire import Fallback, StepBatch
from paceline.wire.synchronisation import Averaging, AveragingRules
from paceline_backend.insight.verdict import ObservedSteps, judge, read_observed
from paceline_backend.store import Store, runs, telemetry
from support.records import add_run, adopted, hello, put_switch, record
from support.web import serving

STEP_S, COMPUTE_S = 0.25, 0.2


def written(
    store: Store, pauses_s: dict[int, float], steps: range = range(40), attempt: int = 0
) -> None:
    """Steps of two ranks, 0.2 s of computing and 0.02 s of reduction; pauses come after a step."""
    at, rows = 1_000.0 + 1_000 * attempt, []
    for step in steps:
        pause_s = pauses_s.get(step, 0.0)
        at += STEP_S + pause_s
        rows += [
            record(
                step,
                rank,
                attempt,
                seq=step - steps.start,
                segment=(step - steps.start) // 8,
                load=40.0,
                data_s=0.01,
                compute_s=COMPUTE_S,
                sync_s=0.02,
                step_s=STEP_S + pause_s,
                ended_at=at,
            )
            for rank in (0, 1)
        ]
    telemetry.write(store, [("r", StepBatch(rows))])


def seen(store: Store, span: tuple[int | None, int | None] = (None, None)) -> ObservedSteps:
    with store.read() as connection:
        return read_observed(connection, runs.key_of(connection, "r"), span)


def test_what_is_between_steps(store: Store) -> None:
    add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello())])
    written(store, {9: 1.0, 19: 1.0, 29: 1.0})
    read = seen(store)
    # 0.25 s less data, computing and reduction, and the checkpoints. After the last step: as usual.
    expected = np.where(np.isin(np.arange(40), (9, 19, 29)), 1.02, 0.02)
    assert read.between_s[:-1] == pytest.approx(expected[:-1])
    assert read.between_s[-1] == pytest.approx(0.02)
    assert np.flatnonzero(read.first).tolist() == [0, 8, 16, 24, 32]
    assert not read.apart.any()
    [cause] = judge(read).causes
    assert (cause.kind, cause.period, cause.times) == ("between", 10, 3)


@pytest.mark.xfail(
    reason="time between steps is what no rank computes in, so nobody is named where one rank "
    "alone is late, such as rank 0 that logs in each step: the others wait in their reduction",
    strict=True,
)
def test_a_rank_that_is_late_between_steps_is_named(store: Store) -> None:
    add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello())])
    rows, took_s = [], STEP_S + 0.1
    for step in range(40):
        rows += [
            record(
                step,
                rank,
                seq=step,
                load=40.0,
                data_s=0.01,
                compute_s=COMPUTE_S,
                sync_s=0.12 if rank == 0 else 0.02,  # rank 1 spends 0.1 s after its reduction
                step_s=took_s,
                ended_at=1_000.0 + took_s * (step + 1),
            )
            for rank in (0, 1)
        ]
    telemetry.write(store, [("r", StepBatch(rows))])
    assert (1,) in [cause.ranks for cause in judge(seen(store)).causes]


def test_which_steps_each_policy_planned(database_url: str) -> None:
    """By the segments that were adopted: an attempt begins again before the last switch."""
    with Store.open(database_url) as store:
        add_run(store, "r", nproc=2)
        telemetry.write(store, [("r", hello())])
        written(store, {})
        assert seen(store).switched == []  # nobody told of segments

        def plan(versions: tuple[int, ...], first: int, attempt: int) -> None:
            for seq, version in enumerate(versions):
                planned = {"attempt": attempt, "counts": [[4, 4]] * 8}
                said = adopted(seq, first + 8 * seq, version, **planned)
                telemetry.write(store, [("r", said)])

        plan((0, 0, 1, 1, 3), 0, 0)
        assert seen(store).switched == [16, 32]
        assert seen(store, (0, 31)).switched == [16]
        assert seen(store, (20, 39)).switched == [32]
        assert seen(store).policies == [slice(0, 16), slice(16, 40)]
        telemetry.write(store, [("r", hello(attempt=1, step=24))])
        written(store, {}, range(24, 64), attempt=1)
        plan((3, 3, 3, 4, 4), 24, 1)
        assert seen(store).switched == [16, 24, 48]


def test_a_restart_is_no_time_between_steps(store: Store) -> None:
    add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello()), ("r", adopted(0, 0, counts=[[4, 4]] * 20))])
    written(store, {}, range(20))
    again = hello(attempt=1, step=20)
    first = adopted(0, 20, attempt=1, counts=[[4, 4]] * 20)
    telemetry.write(store, [("r", again), ("r", first)])
    written(store, {}, range(20, 40), attempt=1)
    read = seen(store)
    assert len(read.step) == 40
    assert read.between_s[19] == pytest.approx(0.02)
    assert judge(read).causes == []


def test_steps_of_relaxed_segments_are_apart_unless_they_fell_back(store: Store) -> None:
    add_run(store, "r", nproc=2)
    relaxed = Averaging(AveragingRules(every=8))
    said: list[Any] = [
        hello(),
        adopted(0, 0, counts=[[4, 4]] * 10),
        adopted(1, 10, counts=[[4, 4]] * 10, synchroniser=relaxed),
        adopted(2, 20, counts=[[4, 4]] * 10, synchroniser=relaxed),
        adopted(3, 30, counts=[[4, 4]] * 10),
        Fallback(0, 2, "it has two optimisers"),
    ]
    telemetry.write(store, [("r", message) for message in said])
    written(store, {})
    assert np.flatnonzero(seen(store).apart).tolist() == list(range(10, 20))


def test_a_range(store: Store) -> None:
    add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello())])
    written(store, {})
    assert seen(store, (5, 20)).step.tolist() == list(range(5, 21))
    assert not len(seen(store, (50, 60)).step)


def test_the_command_line_tells_what_to_do(store: Store, bus_url: str) -> None:
    add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello())])
    written(store, {9: 1.0, 19: 1.0, 29: 1.0})
    with serving(store, bus_url) as client:
        answer: dict[str, Any] = client.get("/api/v1/runs/r/verdict").raise_for_status().json()
    printed = lines(answer)
    assert printed[0].startswith("No rank computes between steps every 10 steps since step 9.")
    assert printed[1].startswith("  What to do: look at checkpoints, evaluation")
    assert lines({"causes": [], "words": "No straggler."}) == ["No straggler."]


def test_the_policy_in_force(store: Store) -> None:
    """Of the last step of the range, and whether it divides batches by sizes and speeds."""
    key = add_run(store, "r", nproc=2)
    telemetry.write(store, [("r", hello())])
    written(store, {})
    assert (seen(store).policy, seen(store).balances) == ("bsp", False), "the run's first policy"
    policies: list[tuple[str, dict[str, Any]]] = [
        ("bsp", {}),
        ("paceline", {"mode": "free"}),
        ("ad-psgd", {"batches": "paceline"}),
        ("lbb", {}),
        ("paceline", {}),  # asked for, and has planned nothing yet
    ]
    with store.write() as connection:
        for version, (policy, parameters) in enumerate(policies):
            row = {"run": key, "version": version, "policy": policy, "parameters": parameters}
            row |= {"requested_at": 1.0, "requested_by": "test"}
            put_switch(connection, row)
    for version, first in enumerate((0, 8, 16, 24)):
        plan = adopted(version, first, version, counts=[[4, 4]] * (16 if version == 3 else 8))
        telemetry.write(store, [("r", plan)])
    in_force = {
        last: (seen(store, (0, last)).policy, seen(store, (0, last)).balances)
        for last in (7, 15, 23, 31)
    }
    assert in_force == {
        7: ("bsp", False),
        15: ("paceline", True),
        23: ("ad-psgd", True),
        31: ("lbb", False),
    }
