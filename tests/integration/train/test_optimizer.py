"""`Session.optimizer`: what a script says of its optimiser, and what happens if it says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline.wire import ALLREDUCE, Adopted, Fallback
from paceline.wire.synchronisation import convert
from support import relaxing
from support.ranks import RankError, Ranks
from support.reports import RUN, on_bus
from support.sessions import WIDTH, Numbered, PreparedOptimizer, network

pytestmark = pytest.mark.ranks
WORLD = 2
RNA = convert("partial", {"probes": 2, "staleness": 4, "mean": True})


@pytest.fixture
def session() -> Iterator[paceline.Session]:
    made = paceline.Session(Numbered(8), global_batch=4)
    yield made
    made.close()


def train(ranks: Ranks, given: dict[str, Any]) -> list[dict[str, Any]]:
    trained: list[dict[str, Any]] = ranks.run(relaxing.train, [RNA], given)
    assert [of_rank["error"] for of_rank in trained] == [None] * WORLD
    assert all(of_rank["replica"] == trained[0]["replica"] for of_rank in trained)
    return trained


# What a declared optimiser and scaler change


@pytest.mark.parametrize(
    "script",
    [
        {"declare": "optimiser"},
        {"declare": "optimiser", "models": 2},
        {"declare": "optimiser", "at_once": True},
        {"declare": "optimiser", "scaler": True},  # the scaler is looked for
        {"declare": "both", "scaler": True},
        {"declare": "both"},  # the scaler is not enabled
        {"declare": "both", "scaler": True, "scalers": 2},
        {"declare": "optimiser", "spare_at": 1},
        {"declare": "optimiser", "temper": True},
        {"no_closure": True},
        {},
        {"models": 2},
        {"scaler": True},
    ],
    ids=str,
)
def test_a_relaxed_synchroniser_comes_into_force(ranks: Ranks, script: dict[str, Any]) -> None:
    assert train(ranks, script)[0]["segments"]


@pytest.mark.parametrize(
    "script",
    [
        {"declare": "optimiser", "optimisers": 2},
        {"declare": "optimiser", "optimisers": 2, "at_once": True},
        {"declare": "optimiser", "closure": True},
        {"declare": "optimiser", "closure": True, "at_once": True},
        {"declare": "optimiser", "criterion": True},
        {"declare": "optimiser", "scaler": True, "scalers": 2},
        {"spare_at": 1},
        {"scaler": True, "scalers": 2},
    ],
    ids=str,
)
def test_the_all_reduce_stays(ranks: Ranks, script: dict[str, Any]) -> None:
    assert not train(ranks, script)[0]["segments"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            {"optimisers": 2},
            "2 optimisers have the wrapped models' parameters, but relaxed synchronisation "
            "supports one: give all parameters to one optimiser, and give that optimiser to "
            "session.optimizer",
        ),
        (
            {"closure": True, "at_once": True},
            "the script steps its optimiser with a closure",
        ),
        ({"at_once": True}, None),
    ],
    ids=str,
)
def test_each_segment_whose_all_reduce_stays_is_reported_once(
    ranks: Ranks, bus_url: str, tmp_path: Path, script: dict[str, Any], why: str | None
) -> None:
    """By rank 0, and after its `Adopted`. While the first step is waited for, nothing is said."""
    env = {"PACELINE_RUN": RUN, "PACELINE_BUS": bus_url, "PACELINE_SPOOL": str(tmp_path)}
    ranks.run(relaxing.train, [RNA], script, env=env)
    messages = [m for m in on_bus(bus_url) if isinstance(m, Adopted | Fallback)]
    relaxed = [
        m.plan.seq for m in messages if isinstance(m, Adopted) and m.plan.synchroniser != ALLREDUCE
    ]
    assert len(relaxed) >= 7
    fallbacks = [m for m in messages if isinstance(m, Fallback)]
    assert fallbacks == ([Fallback(0, seq, why) for seq in relaxed] if why is not None else [])
    for fallback in fallbacks:
        earlier = messages[: messages.index(fallback)]
        assert any(isinstance(m, Adopted) and m.plan.seq == fallback.segment for m in earlier)


def test_a_long_wait_for_the_first_step_is_reported_in_the_middle_of_a_segment(
    ranks: Ranks,
) -> None:
    given = {"at_once": True, "accumulate": 100, "segment": 4}  # the optimiser never steps
    reported = ranks.run(relaxing.impatient, RNA, given)
    assert reported[0] == reported[1] == list(range(1, 8))


def test_a_single_process_has_nothing_to_reduce(session: paceline.Session) -> None:
    suitability = session._loop.gate.suitability
    model = session.wrap(network())
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for _ in range(2)]
    with (
        relaxing.planned([RNA], first=RNA),
        mock.patch.object(suitability, "ask") as ask,
        mock.patch.object(suitability, "tell") as tell,
    ):
        for _, x, y in session.loader():
            nn.functional.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    ask.assert_not_called()
    tell.assert_not_called()


def test_of_a_declared_scaler_the_smallest_scale_is_taken(ranks: Ranks) -> None:
    given = {"declare": "both", "scaler": True, "scalers": 2, "overflow": (5, 1)}
    trained = ranks.run(relaxing.train, [RNA, ALLREDUCE], given)
    assert [of_rank["scale"] for of_rank in trained] == [128.0] * WORLD


def test_an_optimiser_that_takes_the_declared_one_s_place_ends_a_run_that_is_relaxed(
    tmp_path: Path,
) -> None:
    given = {"declare": "optimiser", "at_once": True, "late": True}
    pool = Ranks(WORLD)
    with pytest.raises(RankError):
        pool.run(relaxing.survive, RNA, given, str(tmp_path), timeout_s=40)
    said = [(tmp_path / str(rank)).read_text() for rank in range(WORLD)]
    assert any("steps another: give all parameters to one optimiser" in text for text in said)


def test_a_run_that_begins_relaxed_reduces_until_its_optimiser_has_stepped(ranks: Ranks) -> None:
    """Then it is known how the script steps; rounds come in the same segment."""
    for declared in ({"declare": "optimiser"}, {}):
        for given in ({"at_once": True}, {"at_once": True, "accumulate": 3}):
            trained = train(ranks, declared | given)
            assert trained[0]["segments"][0] == 0


# Refusals


def test_the_optimiser_comes_back_and_trains(session: paceline.Session) -> None:
    model = session.wrap(network())
    plain = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = session.optimizer(plain)
    assert optimizer is plain
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _, x, y in session.loader():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_what_is_no_optimiser_is_refused(session: paceline.Session) -> None:
    model = session.wrap(network())
    plain = torch.optim.SGD(model.parameters(), 0.05)
    wrong: Any
    for wrong in (PreparedOptimizer(plain), torch.optim.SGD, None, model):
        with pytest.raises(TypeError, match=r"give it a torch.optim.Optimizer"):
            session.optimizer(wrong)
    for wrong in (1024.0, torch.amp.GradScaler, plain):
        with pytest.raises(TypeError, match=r"scaler=.*give it a torch.amp.GradScaler"):
            session.optimizer(plain, wrong)
    session.optimizer(plain)  # a refused call changes nothing


def test_an_optimiser_of_no_wrapped_model_is_refused(session: paceline.Session) -> None:
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    with pytest.raises(ValueError, match=r"first write model = session.wrap\(model\)"):
        session.optimizer(optimizer)
    session.wrap(nn.Linear(WIDTH, 1))
    with pytest.raises(ValueError, match="no parameter of a wrapped model"):
        session.optimizer(optimizer)
    session.wrap(plain)
    assert session.optimizer(optimizer) is optimizer


def test_a_second_call_is_refused(session: paceline.Session) -> None:
    model = session.wrap(network())
    first, second = (torch.optim.SGD(model.parameters(), 0.05) for _ in range(2))
    session.optimizer(first)
    for optimizer in (first, second):
        with pytest.raises(paceline.PacelineError, match="has an optimiser already: give all"):
            session.optimizer(optimizer)


def test_a_call_that_comes_too_late_is_refused(session: paceline.Session) -> None:
    model = session.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    next(iter(session.loader()))
    with pytest.raises(paceline.PacelineError, match="before the loader's first iteration"):
        session.optimizer(optimizer)
    session.close()
    with pytest.raises(paceline.PacelineError, match="closed"):
        session.optimizer(optimizer)
