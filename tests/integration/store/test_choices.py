"""Where policies chose another synchroniser: in the database, REST and the report."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.demo import print_report
from paceline_backend.insight.report import run_report
from paceline_backend.store import Store, choices, telemetry
from support.records import add_run, adopted, hello

ROUNDS = {"every": 4, "probes": 2, "staleness": 4, "mean": True}
PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
GROUPS = convert("hierarchical", ROUNDS | {"groups": [[0], [1]]})
OTHERS = convert("hierarchical", ROUNDS | {"groups": [[0, 1]]})

Plan = tuple[int, Synchronisation, str]  # version, how, why; each of two steps


def write(store: Store, *plans: Plan, attempt: int = 0, first_step: int = 0) -> None:
    segments = [
        adopted(
            seq,
            first_step + 2 * seq,
            version,
            policy="paceline-relaxed",
            synchroniser=how,
            why=why,
            attempt=attempt,
        )
        for seq, (version, how, why) in enumerate(plans)
    ]
    start = hello(world=2, attempt=attempt, step=first_step)
    telemetry.write(store, [("r", message) for message in (start, *segments)])


def chosen(store: Store, key: int, *span: int | None, most: int | None = None) -> list[Any]:
    """First step, `before`, synchroniser and why of each."""
    first, last = span or (None, None)
    with store.read() as connection:
        rows = choices.chosen(connection, key, (first, last), most)
    return [(group["from"], group["before"], group["synchroniser"], group["why"]) for group in rows]


def test_a_choice_begins_where_anything_of_it_is_another(store: Store) -> None:
    key = add_run(store, "r")
    write(
        store,
        (0, ALLREDUCE, ""),
        (1, PARTIAL, "one group"),
        (1, GROUPS, "two groups"),
        (1, GROUPS, "two groups, still"),
        (1, GROUPS, ""),  # coasted
        (1, OTHERS, "two others"),
        (1, PARTIAL, "one group again"),
        (2, PARTIAL, "one group, of another version"),
    )
    expected = [
        (2, None, "partial", "one group"),
        (4, "partial", "hierarchical", "two groups"),
        (10, "hierarchical", "hierarchical", "two others"),
        (12, "hierarchical", "partial", "one group again"),
        (14, None, "partial", "one group, of another version"),
    ]
    assert chosen(store, key) == expected
    assert chosen(store, key, most=2) == expected[-2:]
    # In a range the same: what was before it is known, whether or not its first is another.
    for first in range(16):
        within = [expectation for expectation in expected if first <= expectation[0] <= 12]
        assert chosen(store, key, first, 12) == within


def test_the_first_of_a_range_is_compared_with_what_was_before(store: Store) -> None:
    key = add_run(store, "r")
    write(store, (0, PARTIAL, "at first"), (0, PARTIAL, "still"), (0, ALLREDUCE, "another"))
    assert chosen(store, key, 1, None) == [(4, "partial", "allreduce", "another")]


def test_what_a_later_attempt_undid_does_not_count(store: Store) -> None:
    key = add_run(store, "r")
    write(store, (0, ALLREDUCE, "alike"), (0, PARTIAL, "in turn"), (0, ALLREDUCE, "alike again"))
    write(store, (0, ALLREDUCE, "alike, anew"), (0, PARTIAL, "late"), attempt=1, first_step=2)
    assert chosen(store, key) == [
        (0, None, "allreduce", "alike"),
        (4, "allreduce", "partial", "late"),
    ]


def test_the_printed_report_has_a_line_for_each(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    add_run(store, "r")
    write(
        store,
        (1, ALLREDUCE, "all-reduce: alike"),
        (1, ALLREDUCE, "all-reduce: still alike"),
        (1, PARTIAL, "partial: slow in turn"),
    )
    figures = run_report(store, "r")
    switches = [{"policy": "paceline-relaxed", "effective_step": 0}]
    emulated = {"slowdowns": [1.0]}
    print_report(figures | {"switches": switches, "accuracy": 0.5, "emulated": emulated})
    printed = " ".join(capsys.readouterr().out.split())
    assert "paceline-relaxed, from step 4: partial: slow in turn" in printed
