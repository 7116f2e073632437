"""Rounds of relaxed synchronisers, from the bus to what is told of them; over both databases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    ALLREDUCE,
    TELEMETRY,
    Adopted,
    Message,
    RoundBatch,
    RoundRecord,
    StepBatch,
    live,
)
from paceline.wire.bus import connect, publish
from paceline.wire.synchronisation import convert
from paceline_backend.control.ingest import Ingest
from paceline_backend.demo import print_report
from paceline_backend.insight.report import run_report
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.store import Store, StoreRefusedError, rounds, schema, telemetry
from paceline_backend.store.coverage import coverage
from support.leading import working
from support.records import a_round, add_run, adopted, hello, pack_indices, record
from support.waiting import until

PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def round_batch(*records: RoundRecord) -> RoundBatch:
    return RoundBatch(list(records))


def plan(seq: int, version: int = 1, policy: str = "rna", **fields: Any) -> Adopted:
    """Two steps of two ranks, that use samples 6 · seq … 6 · seq + 5."""
    at = 6 * seq
    parts = [[at, at + 1], [at + 2]], [[at + 3], [at + 4, at + 5]]
    first = fields.pop("first_step", 2 * seq)
    counts, indices = pack_indices([[np.array(part) for part in step] for step in parts])
    values = {"synchroniser": PARTIAL} if version else {}
    values |= {"counts": counts, "indices": indices, "policy": policy} | fields
    return adopted(seq, first, version, **values)


def trained(seq: int, **fields: Any) -> StepBatch:
    """What both ranks reported of a plan's steps: three samples a step."""
    values = {"segment": seq, "epoch": 0, "samples": 1} | fields
    steps = (2 * seq, 2 * seq + 1)
    rows = [record(step, rank, **values) for step in steps for rank in (0, 1)]
    return StepBatch([msgspec.structs.replace(row, samples=1 + row.rank) for row in rows])


def in_force(store: Store, key: int, span: tuple[int | None, int | None] = (None, None)) -> Any:
    with store.read() as connection:
        return rounds.in_force(connection, key, span)


def listed(store: Store, key: int, *span: int | None, limit: int = 100) -> list[tuple[int, int]]:
    first, last = span or (None, None)
    with store.read() as connection:
        rows = rounds.rows(connection, key, (first, last), limit)
    return [(row["attempt"], row["seq"]) for row in rows]


# From the bus to the table.


def test_rounds_are_stored_once_and_not_announced(store: Store, bus_url: str) -> None:
    key = add_run(store, "r")
    records = [a_round(seq) for seq in range(4)]
    bad = a_round(9, waited_s=math.nan)
    with connect(bus_url) as bus, working(Ingest(store, bus_url, "one").run):
        for batch in (records[2:], records[:3], [bad], records):
            publish(bus, TELEMETRY, round_batch(*batch), "r")
        publish(bus, TELEMETRY, round_batch(a_round(0)), "nobody")
        until(lambda: bus.xlen(TELEMETRY) == 0, "everything to be settled")
        assert bus.xlen(live("r")) == 0, "who shows rounds asks the store"
        reasons = [fields[b"reason"].decode() for _, fields in _entries(bus, REJECTED)]
    assert [reason.split(" ")[0] for reason in reasons] == ["numbers", "unknown"]
    with store.read() as connection:
        rows = rounds.rows(connection, key, (None, None), 100)
    assert rows == [msgspec.structs.asdict(record) for record in records]


def _entries(bus: redis.Redis, stream: str) -> list[Any]:
    messages: Any = bus.xrange(stream)
    return list(messages)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"waited_s": math.nan},
    {"ended_at": 1e101},
    {"attempt": 2**15},
    {"dropped": 2**31},
    {"staleness": [1, -1]},
    {"staleness": [2**31]},
]


def test_an_impossible_round_is_refused_and_nothing_written(store: Store) -> None:
    add_run(store, "r")
    for bad in IMPOSSIBLE:
        with pytest.raises(StoreRefusedError, match=next(iter(bad)) + "|time"):
            write(store, StepBatch([record(0, 0)]), round_batch(a_round(0), a_round(1, **bad)))
    with store.read() as connection:
        for table in (schema.worker_steps, schema.rounds):
            assert connection.execute(sa.select(table)).all() == []


def test_rounds_of_several_ranks_and_attempts_are_not_each_others(store: Store) -> None:
    key = add_run(store, "r")
    other = add_run(store, "other")
    write(store, round_batch(a_round(0), a_round(0, rank=1), a_round(0, attempt=1)))
    telemetry.write(store, [("other", round_batch(a_round(0)))])
    with store.read() as connection:
        c = schema.rounds.c
        query = sa.select(c.run, c.attempt, c.rank).order_by(c.run, c.attempt, c.rank)
        rows = [tuple(row) for row in connection.execute(query)]
    assert rows == [(key, 0, 0), (key, 0, 1), (key, 1, 0), (other, 0, 0)]


def test_the_newest_rounds_of_a_range_in_order(store: Store) -> None:
    key = add_run(store, "r")
    write(store, round_batch(*(a_round(seq) for seq in reversed(range(10)))))
    assert listed(store, key, limit=3) == [(0, 7), (0, 8), (0, 9)]
    assert listed(store, key, 2, 4) == [(0, 2), (0, 3), (0, 4)]
    assert listed(store, key, 8, None) == [(0, 8), (0, 9)]


# What they were like, worked out by hand.


def fill(store: Store) -> int:
    """bsp in steps 0 and 1, rna in 2–5, n-soft in 6 and 7."""
    key = add_run(store, "r")
    write(store, hello(world=2), plan(0, 0, "bsp"), trained(0))
    write(store, plan(1), plan(2), plan(3, 2, "n-soft"), *(trained(seq) for seq in (1, 2, 3)))
    waits = iter((0.25, 0.5, 0.125, 8.5, 0.25))
    write(
        store,
        round_batch(
            a_round(0, segment=1, step=2, staleness=[1, 0], waited_s=next(waits)),
            a_round(
                1,
                segment=1,
                step=3,
                contributors=2,
                staleness=[1, 1],
                waited_s=next(waits),
                copied_s=0.5625,
            ),
            a_round(2, segment=2, step=4, staleness=[0, 1], dropped=2, waited_s=next(waits)),
            a_round(3, segment=2, step=4, contributors=2, staleness=[2, 0], waited_s=next(waits)),
            a_round(4, segment=3, step=6, staleness=[1, 0, 4], dropped=3, waited_s=next(waits)),
        ),
    )
    return key


def test_what_rounds_were_like_under_each_policy(store: Store) -> None:
    key = fill(store)
    rna, n_soft = in_force(store, key)
    assert rna == {
        "version": 1,
        "policy": "rna",
        "synchroniser": "partial",
        "from": 2,
        "to": 4,
        "rounds": 4,
        "world": 2,
        "contributors": 1.5,
        "staleness": [4, 2],
        "samples": 12,
        "dropped": 2,
        "dropped_share": pytest.approx(2 / 12),
        "waited_s": 0.375,
        "waited_s_p95": pytest.approx(0.5 + 0.85 * 8),
        "reduced_s": 0.125,
        "copied_s": 0.1875,
        "bytes": 256,
        # From 1000 − 0.25 − 0.125 (or 1003 − 8.5 − 0.125, which is earlier) to 1003.
        "rounds_per_s": pytest.approx(4 / 8.625),
        "gradients_per_s": pytest.approx(6 / 8.625),
    }
    assert (n_soft["policy"], n_soft["version"], n_soft["from"], n_soft["to"]) == (
        "n-soft",
        2,
        6,
        6,
    )
    assert (n_soft["staleness"], n_soft["samples"], n_soft["dropped"]) == ([1, 0, 4], 6, 3)


def test_a_range_of_steps(store: Store) -> None:
    key = fill(store)
    (rna,) = in_force(store, key, (3, 4))
    assert (rna["from"], rna["to"], rna["rounds"], rna["samples"]) == (3, 4, 3, 6)
    assert in_force(store, key, (0, 1)) == in_force(store, key, (7, None)) == []


def test_rounds_whose_plan_has_not_come_yet_wait_for_it(store: Store) -> None:
    key = add_run(store, "r")
    write(store, hello(world=2), round_batch(a_round(0, segment=0)))
    assert in_force(store, key) == []
    write(store, plan(0))
    (period,) = in_force(store, key)
    assert (period["rounds"], period["samples"], period["dropped_share"]) == (1, 0, None)


def test_what_a_later_attempt_undid_does_not_count(store: Store) -> None:
    """Attempt 1 starts again at step 4, two minutes later, and comes to the end of segment 2."""
    key = fill(store)
    write(store, hello(world=2, attempt=1, step=4))
    assert listed(store, key) == [(0, 0), (0, 1)]
    write(store, plan(0, attempt=1, first_step=4), trained(2, attempt=1, segment=0))
    write(
        store,
        round_batch(
            *(a_round(i, attempt=1, segment=0, step=4 + i, ended_at=1120.0 + i) for i in (0, 1))
        ),
    )
    assert listed(store, key) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (rna,) = in_force(store, key)
    assert (rna["rounds"], rna["to"], rna["dropped"], rna["samples"]) == (4, 5, 0, 12)
    # From 999.625 to 1001 and from 1119.625 to 1121, without the two minutes between.
    assert rna["rounds_per_s"] == pytest.approx(4 / (1.375 + 1.375))


def test_time_under_another_synchroniser_is_not_counted(store: Store) -> None:
    """A policy that chooses for each segment: an hour of all-reduce lies between two rounds."""
    key = add_run(store, "r")
    plans = [plan(seq, synchroniser=ALLREDUCE if seq == 1 else PARTIAL) for seq in range(3)]
    ends = {0: 1_000.0, 2: 4_600.0}
    made = [a_round(seq, segment=seq, step=2 * seq, ended_at=at) for seq, at in ends.items()]
    write(store, hello(world=2), *plans, *(trained(seq) for seq in range(3)), round_batch(*made))
    (period,) = in_force(store, key)
    assert (period["rounds"], period["samples"]) == (2, 12)
    assert period["rounds_per_s"] == pytest.approx(2 / (2 * 0.375))


def test_over_time(store: Store) -> None:
    key = fill(store)
    with store.read() as connection:
        summary = rounds.summary(connection, key, (None, None), 100)
        thin = rounds.summary(connection, key, (None, None), 2)["over_time"]
        none = rounds.summary(connection, key, (0, 1), 100)
        empty = rounds.summary(connection, add_run(store, "empty"), (None, None), 100)
    assert (summary["from"], summary["to"], summary["newest"]) == (2, 6, 6)
    assert summary["over_time"] == {
        "bucket": 1,
        "step": [2, 3, 4, 6],
        "rounds": [1, 1, 2, 1],
        "contributors": [1.0, 2.0, 1.5, 1.0],
        "contributors_min": [1, 2, 1, 1],
        "contributors_max": [1, 2, 2, 1],
        "dropped": [0, 0, 2, 3],
        "waited_s": [0.25, 0.5, 4.3125, 0.25],
        "waited_s_max": [0.25, 0.5, 8.5, 0.25],
        "reduced_s": [0.125] * 4,
        "copied_s": [0.0625, 0.5625, 0.0625, 0.0625],
        "bytes": [64, 64, 128, 64],
    }
    assert (thin["bucket"], thin["step"], thin["rounds"]) == (5, [2, 6], [4, 1])
    assert (none["from"], none["newest"], none["over_time"]["step"]) == (None, 6, [])
    assert (empty["newest"], empty["in_force"]) == (None, [])


def test_sums_that_no_integer_holds(store: Store) -> None:
    key = add_run(store, "r")
    write(
        store,
        hello(world=2),
        plan(0),
        round_batch(*(a_round(i, segment=0, step=0, bytes=2**62) for i in range(4))),
    )
    (period,) = in_force(store, key)
    assert period["bytes"] == 2**64
    with store.read() as connection:
        assert rounds.summary(connection, key, (None, None), 9)["over_time"]["bytes"] == [2**64]


def test_the_newest_rounds_are_those_of_all_ranks(store: Store) -> None:
    key = add_run(store, "r")
    reported = [
        a_round(seq, rank=rank, reduced_s=1 + 4 * rank + seq) for rank in (0, 1) for seq in range(4)
    ]
    write(store, hello(world=2), plan(0), plan(1), round_batch(*reported))
    with store.read() as connection:
        newest = rounds.newest_reduced_s(connection, key, 0, [0, 1], 4)
        of_first = rounds.newest_reduced_s(connection, key, 0, [0], 4)
    assert sorted(newest) == [3, 4, 7, 8]
    assert sorted(of_first) == [1, 2, 5, 6]


# What else tells of them.


def test_coverage_tells_what_was_used_but_not_applied(store: Store) -> None:
    key = fill(store)
    with store.read() as connection:
        covering = coverage(connection, key)
    (epoch,) = covering["epochs"]
    assert (epoch["used"], epoch["missing"], epoch["dropped"], covering["dropped"]) == (24, 8, 5, 5)
    assert covering["exact"], "coverage is about use"


def test_the_report_has_a_line_for_each(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    figures = run_report(store, "r", warmup=0)
    rna, n_soft = (period["words"] for period in figures["synchronisation"])
    assert rna == (
        "rna (partial), steps 2–4: 4 rounds, 0.5 a second, with 1.5 of 2 ranks on average; "
        "response time 375.0 ms (95 %: up to 7.30 s), copying 187.5 ms. "
        "2 samples (16.7 %) were computed, but not applied: too late."
    )
    assert "3 samples (50.0 %)" in n_soft
    figures |= {
        "switches": [{"policy": "n-soft", "effective_step": 6}],
        "accuracy": 0.5,
        "emulated": {"slowdowns": [1.0, 1.0]},
    }
    print_report(figures)
    printed = " ".join(capsys.readouterr().out.split())
    assert rna in printed
    assert "the gradients of 5 samples were not applied" in printed


# REST.
