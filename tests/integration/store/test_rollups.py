"""Long ranges are read from roll-ups, and come out as if they were read step by step."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from paceline.wire import StepBatch
from paceline_backend.store import Store, reads, records, schema, telemetry
from paceline_backend.store.rollups import reading, writing
from paceline_backend.store.rollups.metrics import METRICS
from paceline_backend.store.schema import METRIC_NAMES, rank_rollups, step_rollups
from support.records import add_run, hello, record


def batch(first: int, end: int, ranks: int = 2, attempt: int = 0, **fields: Any) -> StepBatch:
    """Records that differ from step to step; ranks without samples and without a forecast, too."""
    return StepBatch(
        [
            record(
                step,
                rank,
                attempt,
                samples=(step + rank) % 5,
                load=float((step * 7 + rank) % 90),
                compute_s=0.01 * ((step * 13 + 5 * rank) % 31 + 1),
                sync_s=0.001 * ((step + rank) % 11),
                ett_s=None if step % 3 else 0.2,
                **fields,
            )
            for step in range(first, end)
            for rank in range(ranks)
        ]
    )


def write(store: Store, *messages: Any) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def rolled(store: Store) -> list[int]:
    """First steps of the blocks that have roll-ups, of steps and of ranks alike."""
    with store.read() as connection:
        steps = sa.select(step_rollups.c.step).order_by(step_rollups.c.step)
        ranks = sa.select(rank_rollups.c.step).distinct().order_by(rank_rollups.c.step)
        of_steps = [*connection.execute(steps).scalars()]
        assert of_steps == [*connection.execute(ranks).scalars()]
        return of_steps


def answers(store: Store, key: int, *spans: reads.Range) -> list[Any]:
    """All that roll-ups serve: steps and ranks in buckets, and the sums of each rank."""
    with store.read() as connection:
        given: list[Any] = [records.sums(connection, key, 0, 2)]
        for span in spans:
            for points in (2, 4, 8):
                given.append(reads.step_columns(connection, key, span, points))
                given.append(reads.worker_step_columns(connection, key, span, points))
        given.append(
            reads.worker_step_columns(connection, key, (None, None), 4, reading.RankChoice([1]))
        )
        return given


# In the last one, buckets are whole roll-ups.
SPANS: list[reads.Range] = [
    (None, None),
    (0, 999),
    (37, 842),
    (100, 699),
    (None, 555),
    (500, 999),
]


def same_as_step_by_step(store: Store, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[reading.Cover] = []
    cover = reading.cover

    def noted(*given: Any) -> reading.Cover | None:
        covered = cover(*given)
        used.extend([] if covered is None else [covered])
        return covered

    with monkeypatch.context() as patch:
        patch.setattr(reading, "cover", noted)
        from_rollups = answers(store, key, *SPANS)
        patch.setattr(reading, "cover", lambda *_: None)
        step_by_step = answers(store, key, *SPANS)
    assert len(used) > 10, "no roll-up was read"
    for mine, theirs in zip(from_rollups, step_by_step, strict=True):
        same(mine, theirs)


def same(mine: Any, theirs: Any) -> None:
    """Equal but for rounding."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        mine, theirs = list(mine.values()), list(theirs.values())
    if isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for left, right in zip(mine, theirs, strict=True):
            same(left, right)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    else:
        assert mine == theirs


def test_every_metric_is_rolled_up() -> None:
    assert tuple(METRICS) == METRIC_NAMES


def test_a_block_is_rolled_up_when_its_last_step_is_complete(store: Store) -> None:
    add_run(store, "r")
    write(store, hello(), batch(0, 99), StepBatch([record(99, 1)]))
    assert rolled(store) == []
    write(store, StepBatch([record(99, 0)]), batch(300, 400))
    assert rolled(store) == [0, 300]


def test_buckets_and_sums_from_rollups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add_run(store, "r")
    write(store, hello(), batch(0, 420))
    write(store, batch(430, 1_050))  # ten steps are lost
    assert rolled(store) == [0, 100, 200, 300, 500, 600, 700, 800, 900]
    same_as_step_by_step(store, key, monkeypatch)


def test_repeated_records_change_no_rollup(store: Store) -> None:
    key = add_run(store, "r")
    write(store, hello(), batch(0, 1_000))
    before = answers(store, key, *SPANS)
    write(store, batch(150, 460))
    write(store, hello(), batch(0, 1_000))
    assert answers(store, key, *SPANS) == before


def test_a_restart_that_overwrites_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add_run(store, "r")
    write(store, hello(), batch(0, 1_000))
    write(store, hello(attempt=1, step=250))
    write(store, StepBatch([record(step, 0, attempt=1) for step in range(250, 320)]))
    assert rolled(store) == [0, 100, *range(400, 1_000, 100)], "mixed steps are not complete"
    same_as_step_by_step(store, key, monkeypatch)
    write(store, StepBatch([record(step, 1, attempt=1) for step in range(250, 320)]))
    assert rolled(store) == [*range(0, 1_000, 100)]
    same_as_step_by_step(store, key, monkeypatch)


def test_steps_that_came_before_the_hello(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add_run(store, "r")
    write(store, batch(0, 1_000))
    assert rolled(store) == []
    write(store, hello())
    assert rolled(store) == [*range(0, 1_000, 100)]
    same_as_step_by_step(store, key, monkeypatch)


def test_a_range_with_many_gaps_is_read_step_by_step(store: Store) -> None:
    key = add_run(store, "r")
    write(store, hello(), *(batch(first, first + 100) for first in range(0, 30_000, 200)))
    with store.read() as connection:
        assert reading.cover(connection, key, 0, 29_999) is None
        assert len(reads.step_columns(connection, key, (None, None), 20)["step"]) > 10


def fill_all(store: Store) -> None:
    for _ in range(100):
        if writing.fill(store) is None:
            return
    raise AssertionError("filling in does not end")


def put_off(store: Store, *messages: Any) -> None:
    telemetry.write(store, [("r", message) for message in messages], roll_up=False)


def test_put_off_rollups_are_filled_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add_run(store, "other")
    key = add_run(store, "r")
    write(store, hello(), batch(0, 300))
    put_off(store, batch(300, 700))
    put_off(store, batch(750, 900))
    write(store, batch(900, 1_000))
    assert rolled(store) == [0, 100, 200, 900]
    put_off(store, batch(700, 750))
    fill_all(store)
    assert rolled(store) == [*range(0, 1_000, 100)]
    same_as_step_by_step(store, key, monkeypatch)


def test_a_block_whose_steps_change_has_no_rollup_until_it_is_filled_in(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_run(store, "r")
    write(store, hello(), batch(0, 1_000))
    put_off(store, hello(attempt=1, step=250), batch(250, 310, attempt=1))
    assert rolled(store) == [0, 100, *range(400, 1_000, 100)]
    fill_all(store)
    assert rolled(store) == [*range(0, 1_000, 100)]
    same_as_step_by_step(store, key, monkeypatch)


def test_runs_take_turns_at_being_filled_in(store: Store) -> None:
    """One that always has new ones does not hold up the others."""
    for run in ("r", "other"):
        add_run(store, run)
        message = hello(), batch(0, 1_200)
        telemetry.write(store, [(run, each) for each in message], roll_up=False)
    turns, last = [], 0
    for first in range(1_200, 1_900, 100):
        put_off(store, batch(first, first + 100))
        last = writing.fill(store, last) or 0
        turns.append(last)
    assert len(set(turns[:2])) == 2
    assert turns[0] == turns[2] == turns[4]


def test_what_fills_in_may_come_before_the_last_steps_of_a_block(store: Store) -> None:
    add_run(store, "r")
    write(store, hello())
    put_off(store, batch(0, 150))
    fill_all(store)
    assert rolled(store) == [0]
    put_off(store, batch(150, 200))
    fill_all(store)
    assert rolled(store) == [0, 100]


def test_numbers_that_cannot_be_rolled_up_stop_nothing(store: Store) -> None:
    """Postgres raises where a result is too small for a double."""
    key = add_run(store, "r")
    odd = [record(step, rank, load=1e-200, compute_s=1e-200) for step in (5,) for rank in (0, 1)]
    write(store, hello(), batch(0, 5), StepBatch(odd), batch(6, 100))
    with store.read() as connection:
        rows = sa.select(sa.func.count()).where(schema.steps.c.run == key)
        assert connection.execute(rows).scalar() == 100
    assert rolled(store) == ([0] if store.is_sqlite else [])


def rows_read(connection: sa.Connection) -> int:
    """How many rows of steps this transaction has read so far, on Postgres."""
    tables = "('worker_steps', 'steps', 'step_rollups', 'rank_rollups')"
    query = "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables"
    count = connection.execute(sa.text(f"{query} WHERE relname IN {tables}")).scalar_one()
    return int(count)


def test_statistics_from_before_a_run_began_do_not_mislead(database_url: str, store: Store) -> None:
    """Postgres took a run to have no rows, and read all of them for each of a block's steps."""
    if store.is_sqlite:
        pytest.skip("of Postgres")
    steps, ranks = 1_000, 4
    for run in ("r0", "r1"):
        add_run(store, run)
        telemetry.write(store, [(run, hello(world=ranks)), (run, batch(0, steps, ranks))])
    with store.write() as connection:
        connection.execute(sa.text("ANALYZE"))
    key = add_run(store, "r")
    write(store, hello(world=ranks), batch(0, steps, ranks))
    with store.write() as connection:
        before = rows_read(connection)
        writing.renew(connection, [(key, range(500, 600))])
        of_a_block = rows_read(connection) - before
    assert 100 * ranks <= of_a_block < 10 * 100 * ranks
    with store.read() as connection:
        for span in SPANS:
            before = rows_read(connection)
            reads.worker_step_columns(connection, key, span, 8)
            reads.step_columns(connection, key, span, 8)
            assert rows_read(connection) - before < 10 * steps * ranks
