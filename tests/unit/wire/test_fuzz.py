"""Whatever arrives over the bus is taken or refused; nothing else is raised, training goes on."""

from __future__ import annotations

import logging
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from torch.distributed import HashStore

from paceline import wire
from paceline.core.terms import Terms
from paceline.train.checkpoint.position import Position
from paceline.train.plan.leader import Leader
from paceline.wire import Plan, Proposal, StopTraining, WireError, synchronisation
from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.simulator import sync as models
from support.contexts import met, run_context
from support.fuzz import COUNTS, variants

WORLD, SAMPLES, BATCH = 2, 24, 4
ROUNDS = {"probes": 2, "staleness": 4, "mean": True}
GOOD = [
    convert("allreduce"),
    convert("averaging", {"every": 3}),
    convert("pairwise"),
    convert("partial", ROUNDS),
    convert("partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False}),
    convert("hierarchical", ROUNDS | {"groups": [[0], [1]], "every": 4}),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("good", GOOD, ids=lambda what: f"{what.name} {what.digest[:4]}")
def test_synchronisations_are_taken_or_refused(good: Synchronisation, count: int) -> None:
    taken = 0
    for data in variants(msgspec.msgpack.encode(good), -(-count // len(GOOD)), seed=1):
        try:
            what = synchronisation.decode(data)
        except ValueError as error:
            assert str(error)
            continue
        if what.defect(WORLD) is None:
            models.make(what, WORLD, seed=0)
            taken += 1
    assert taken  # else no variant came past the first check


class Controller:
    """What a leader uses of `paceline.train.plan.proposals.Proposals`, with one message to read."""

    def __init__(self, data: bytes) -> None:
        self.received = 0
        self.newest: Proposal | None = None
        self._offered: Proposal | None = None
        self.stop_reason: str | None = None
        try:
            _, message = wire.decode({b"v": b"1", b"run": b"r", b"data": data})
        except WireError:
            return
        if isinstance(message, Proposal):
            self.received, self.newest, self._offered = 1, message, message
        elif isinstance(message, StopTraining):
            self.stop_reason = message.reason

    def take(self, seq: int, wait_s: float) -> Proposal | None:
        """The proposal, if it is for this segment; once, as the leader asks until there is none."""
        offered, self._offered = self._offered, None
        return offered if offered is not None and offered.plan.seq == seq else None


def segment(what: Synchronisation, rng: random.Random) -> Plan:
    """One that a leader takes at first."""
    samples = np.array(rng.sample(range(SAMPLES), 2 * BATCH), "<u4")
    counts = [[rng.randint(0, BATCH)] for _ in range(2)]
    return Plan(
        seq=0,
        epoch=0,
        first_step=0,
        counts=[[n, BATCH - n] for [n] in counts],
        indices=samples.tobytes(),
        policy="rna",
        version=0,
        source="controller",
        epoch_end=False,
        ett_s=[[1.0, 2.0]] * 2,
        shares=[0.5, 0.5],
        feedback=[(0, 4)],
        memory={"counts": [1, 2]},
        threads=[1, 2],
        synchroniser=what,
        why="because",
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("good", GOOD, ids=lambda what: f"{what.name} {what.digest[:4]}")
def test_a_leader_adopts_or_coasts_whatever_is_proposed(
    good: Synchronisation, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    sources: list[str] = []
    proposal = Proposal(0, segment(good, random.Random(0)), "controller")
    for data in variants(msgspec.msgpack.encode(proposal), -(-count // len(GOOD)), seed=2):
        control: Any = Controller(data)
        terms = Terms(SAMPLES, BATCH, 0, False, "samples", 2)
        leader = Leader(
            run_context(terms),
            met(WORLD, np.ones(SAMPLES), HashStore()),
            Position(),
            proposals=control,
            announce=lambda adopted: sources.append(adopted.plan.source),
        )
        leader.advance(0)
        leader.advance(0)
    assert len(sources) >= 2 * (count // len(GOOD))
    assert {"coast", "controller"} <= set(sources)


def test_the_reason_of_a_refusal_is_short_however_long_what_it_quotes() -> None:
    data = msgspec.msgpack.encode({"type": "x" * 70_000})
    with pytest.raises(WireError, match="not a paceline message") as caught:
        wire.decode({b"v": b"1", b"run": b"r", b"data": data})
    assert len(str(caught.value)) < 1100
