"""One run of real ranks under many faults: it completes, and nothing is lost or done twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch

from paceline_backend.server.stack import Stack
from support import chaos
from support.chaos import WORLD, Chaos, dealt, own, quantile
from support.chaos_script import EVERY, SAMPLES, STEPS
from support.postgres import Postgres

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with chaos.small_disk(tmp_path / "disk", 192) as path:
        yield path


def check(training: Chaos, epochs: int, database: str) -> None:
    """The run is whole: by REST, by the database's rows, and by what the ranks wrote down."""
    run = training.finish()
    assert run["state"] == "finished", run["message"]
    total = epochs * STEPS
    coverage = training.stack.api("GET", f"/runs/{training.run}/coverage")
    assert coverage["exact"] is True, coverage
    assert [epoch["used"] for epoch in coverage["epochs"]] == [SAMPLES] * epochs
    engine = sa.create_engine(database)
    with engine.connect() as connection:
        rows = connection.execute(
            sa.text(
                "SELECT step, rank, count(*), max(epoch) FROM worker_steps WHERE run = "
                "(SELECT key FROM runs WHERE id = :id) GROUP BY step, rank"
            ),
            {"id": training.run},
        ).all()
    engine.dispose()
    assert {count for *_, count, _ in rows} == {1}, "rows doubled"
    missing = {(s, r) for s in range(total) for r in range(WORLD)} - {(s, r) for s, r, *_ in rows}
    assert not missing, f"rows lost: {sorted(missing)}"
    assert len(rows) == total * WORLD
    _check_samples(training.directory, epochs)
    ends = [torch.load(training.directory / f"end-{rank}.pt") for rank in range(WORLD)]
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _check_samples(directory: Path, epochs: int) -> None:
    """The last time that each step was made, the ranks used each sample once in each epoch.

    A rank that dies may have made one step more than the others, which nobody goes on from.
    """
    used: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for lines in own(directory).values():
        newest = {step: (epoch, samples) for _, epoch, step, samples in lines}
        assert sorted(newest) == list(range(epochs * STEPS))
        for epoch, samples in newest.values():
            used[epoch] += samples
        began = 0
        for before, after in pairwise(lines):
            if after[0] != before[0]:  # another process: it goes on from the last checkpoint
                assert began <= after[2] <= before[2] + 1
                assert before[2] - after[2] < EVERY + 1, "more steps done again than between saves"
                began = after[2]
    for epoch, samples in used.items():
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}"


def suffer(training: Chaos, seed: int, count: int, policy: str) -> int:
    """Starts a run, deals it faults; its epochs."""
    faults = dealt(seed, count, sorted(training.kinds))
    epochs = -(-(faults[-1].step + 10) // STEPS)
    training.start(epochs, policy)
    for fault in faults:
        training.suffer(fault)
    return epochs


def report(training: Chaos) -> None:
    for name, values in (
        ("trained", [outcome.trained_s for outcome in training.outcomes]),
        ("shown", [outcome.shown_s for outcome in training.outcomes]),
    ):
        print(
            f"{len(values)} faults: {name} again after p50 {quantile(values, 0.5):.1f} s, "
            f"p95 {quantile(values, 0.95):.1f} s, at most {max(values):.1f} s"
        )


@pytest.mark.timeout(1800)
def test_each_kind_of_fault_once(disk: Path, tmp_path: Path) -> None:
    with Stack(disk / "data", 0) as stack:
        training = Chaos(stack, tmp_path / "training")
        epochs = suffer(training, 1, len(training.kinds), "paceline")
        check(training, epochs, f"sqlite:///{stack.data / 'paceline.db'}")
        report(training)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_faults(disk: Path, tmp_path: Path) -> None:
    postgres = Postgres().start()
    try:
        stack = Stack(disk / "data", 0, database=postgres.database())
        clock = tmp_path / "clock"
        stack.agent_env = chaos.environment_with_clock(clock)
        with stack:
            training = Chaos(stack, tmp_path / "training", postgres, clock)
            epochs = suffer(training, 2, 100, "chronica")
            check(training, epochs, str(stack.database))
            report(training)
    finally:
        postgres.stop()
