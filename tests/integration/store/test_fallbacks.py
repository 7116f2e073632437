"""Segments that were all-reduced in spite of their synchroniser, from the bus to REST."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline.wire import MOST_WHY, Adopted, Fallback, Message, RoundBatch, StepBatch
from paceline.wire.synchronisation import convert
from paceline_backend.insight.report import run_report
from paceline_backend.store import (
    Store,
    StoreRefusedError,
    choices,
    reads,
    rounds,
    runs,
    segments,
    telemetry,
)
from support.records import a_round, add_run, adopted, hello, record
from support.web import serving

PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
WHY = "the script steps its optimiser with a closure"


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def plan(seq: int, attempt: int = 0) -> Adopted:
    return adopted(seq, 2 * seq, 1, synchroniser=PARTIAL, policy="rna", attempt=attempt)


def shown(store: Store, key: int) -> dict[tuple[int, int], str]:
    with store.read() as connection:
        rows = reads.segment_rows(connection, key, (None, None), 100)
    return {(row["attempt"], row["seq"]): row["fallback"] for row in rows}


def test_a_fallback_is_noted_at_its_segment(store: Store) -> None:
    """In the batch of its `Adopted`, even before it, or in a later one; repetitions do nothing."""
    key = add_run(store, "r")
    other = add_run(store, "other")
    telemetry.write(store, [("other", plan(0))])
    write(store, hello(world=2), Fallback(0, 0, WHY), plan(0), plan(1), plan(2), plan(0, 1))
    write(store, Fallback(0, 2, WHY))
    write(store, plan(0), Fallback(0, 2, WHY))
    assert shown(store, key) == {(0, 0): WHY, (0, 1): "", (0, 2): WHY, (1, 0): ""}
    assert shown(store, other) == {(0, 0): ""}


def test_one_without_a_segment_is_dropped_quietly(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "paceline_backend.store.telemetry")
    key = add_run(store, "r")
    write(store, plan(0), Fallback(0, 7, WHY))
    assert shown(store, key) == {(0, 0): ""}
    (line,) = caplog.records
    assert line.levelno == logging.DEBUG
    assert line.getMessage().startswith("run r: a fallback of segment 7 of attempt 0 is dropped")


MALFORMED = [
    Fallback(-1, 0, WHY),
    Fallback(2**15, 0, WHY),
    Fallback(0, -1, WHY),
    Fallback(0, 2**63, WHY),
    Fallback(0, 0, ""),
    Fallback(0, 0, "x" * (MOST_WHY + 1)),
    Fallback(0, 0, "\ud800"),
]


def test_a_malformed_one_is_refused_and_nothing_written(store: Store) -> None:
    key = add_run(store, "r")
    for bad in MALFORMED:
        with pytest.raises(StoreRefusedError, match=r"run r: Fallback\.(attempt|segment|why)"):
            write(store, plan(0), bad)
        assert shown(store, key) == {}


def test_a_reason_with_a_nul_is_stored_as_other_texts_are(store: Store) -> None:
    key = add_run(store, "r")
    write(store, plan(0), Fallback(0, 0, "a\0b"))
    assert shown(store, key) == {(0, 0): "a\N{REPLACEMENT CHARACTER}b"}


def test_what_fell_back_is_no_part_of_what_rounds_were_like(store: Store) -> None:
    """Neither samples nor time; a segment that had rounds after all counts as before."""
    key = add_run(store, "r")
    batches = [
        StepBatch([record(step, rank, samples=3, segment=step // 2) for rank in (0, 1)])
        for step in range(8)
    ]
    write(store, hello(world=2), *(plan(seq) for seq in range(4)), *batches)
    reported = [(0, 1_000.0), (2, 2_000.0), (3, 2_001.0)]  # segment, end
    made = [
        a_round(number, segment=segment, step=2 * segment, ended_at=at)
        for number, (segment, at) in enumerate(reported)
    ]
    write(store, RoundBatch(made))

    def figures() -> Any:
        with store.read() as connection:
            (rna,) = rounds.in_force(connection, key, (None, None))
        return rna["rounds"], rna["samples"], rna["rounds_per_s"]

    assert figures() == (3, 48, pytest.approx(3 / 1_001.375))
    write(store, Fallback(0, 1, WHY), Fallback(0, 3, WHY))
    assert figures() == (3, 36, pytest.approx(3 / (0.375 + 1.375)))


def test_the_report_says_which_segments_fell_back(store: Store) -> None:
    """Those that a later attempt undid do not count."""
    add_run(store, "r")
    write(store, hello(world=2), *(plan(seq) for seq in range(4)))
    write(store, *(Fallback(0, seq, WHY) for seq in (1, 2)), Fallback(0, 3, "another reason"))
    version_1 = {"version": 1, "policy": "rna", "synchroniser": "partial"}
    first = version_1 | {"from": 2, "to": 5, "segments": 2, "why": WHY}
    second = version_1 | {"from": 6, "to": 7, "segments": 1, "why": "another reason"}
    assert run_report(store, "r")["fallbacks"] == [first, second]
    with store.read() as connection:
        key = runs.key_of(connection, "r")
        assert choices.fallbacks(connection, key, (0, 1)) == []
        assert choices.fallbacks(connection, key, (5, 6)) == [
            first | {"from": 4, "segments": 1},
            second,
        ]
    write(store, hello(world=2, attempt=1, step=4))
    assert run_report(store, "r")["fallbacks"] == [first | {"to": 3, "segments": 1}]


def test_rest_tells_of_fallbacks(store: Store, bus_url: str) -> None:
    add_run(store, "r")
    write(store, hello(world=2), plan(0), plan(1), Fallback(0, 1, WHY))
    with serving(store, bus_url) as client:

        def get(path: str) -> Any:
            answer = client.get(f"/api/v1/runs/r/{path}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert [segment["fallback"] for segment in get("segments")] == ["", WHY]
        assert [segment["fallback"] for segment in get("view")["segments"]] == ["", WHY]
        (fallback,) = get("synchronisation")["fallbacks"]
        assert (fallback["from"], fallback["to"], fallback["why"]) == (2, 3, WHY)
        assert get("report")["fallbacks"] == [fallback]


def test_relaxed_segments_say_whether_they_fell_back(store: Store) -> None:
    key = add_run(store, "r")
    write(store, hello(world=2), adopted(0, 0), plan(1), plan(2), Fallback(0, 2, WHY))
    with store.read() as connection:
        relaxed = segments.relaxed(connection, key, hello(world=2), 0)
    assert [(r.first_step, r.end, r.fallback) for r in relaxed] == [(2, 4, ""), (4, 6, WHY)]
