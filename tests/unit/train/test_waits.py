"""A rank that waits long says why, once: ranks' own threads on a virtual clock."""

from __future__ import annotations

import logging

import pytest

from paceline.core.rounds import Call, Drift
from support.virtual_rounds import Ran, train

STEPS = 3
LEAD = (Call(quorum=1), Drift(staleness=None, lead=0, mean=False))


def waits(
    caplog: pytest.LogCaptureFixture, call: Call, drift: Drift, slow_s: float, **more: object
) -> tuple[list[str], Ran]:
    """What ranks log where each step takes rank 0 a second and rank 1 longer."""
    work_s = [[1.0] * STEPS, [slow_s] * STEPS]
    with caplog.at_level(logging.INFO, "paceline.train.sync.rounds"):
        ran = train(call, drift, work_s, [[8] * STEPS] * 2, 0.25, 0.125, **more)  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records], ran


def test_a_long_wait_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    lines, _ = waits(caplog, *LEAD, slow_s=9.0)
    assert lines[0] == (
        "rank 0 has waited 1 s after relaxed step 1 of its segment: it is further ahead of the "
        "slowest rank than `lead` allows. Ranks that have done the fewest steps, as far as this "
        "rank knows: [1]. Round r/1 has not been called"
    )
    assert [line.split(":")[0] for line in lines] == [
        f"rank 0 has waited 1 s after relaxed step {step} of its segment" for step in (1, 2, 3)
    ]


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines, ran = waits(caplog, *LEAD, slow_s=1.5)
    assert lines == []
    assert ran.ended_at[0][0] > 1.0, "rank 0 waited"


def test_a_rank_that_waits_to_meet_the_others_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lines, _ = waits(caplog, Call(probes=1), Drift(), slow_s=9.0)
    (line,) = lines
    assert "after relaxed step 3 of its segment: it has no steps left, but other ranks have" in line


def test_a_rank_in_a_group_is_named_as_the_run_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and in the errors of a rank that leaves and of a rank that waits for it."""
    lines, _ = waits(caplog, *LEAD, slow_s=9.0, members=[2, 5])
    assert lines[0].startswith("rank 2 has")
    assert "as far as this rank knows: [5]." in lines[0]
    for how, words in (
        ("aborts", "rank 2, round 1: rank 5 has left"),
        ("stuck", "rank 2, round 1: waited 60 s for ranks [5]"),
    ):
        ran = train(
            *LEAD,
            [[1.0] * STEPS, [9.0] * STEPS],
            [[8] * STEPS] * 2,
            0.25,
            0.125,
            leaves=lambda rank, step, how=how: how if rank == 1 else None,  # type: ignore[misc]
            timeout_s=60.0,
            members=[2, 5],
        )
        assert (ran.errors[0] or "").startswith(words)
