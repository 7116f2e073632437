"""Models that a script trains and that no session wraps, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from paceline import PacelineError
from paceline.train.ddp import CurrentStep, SingleProcess
from paceline.train.timing import RunningStep
from paceline.train.unwrapped import UnwrappedModels

IN_A_STEP = cast(RunningStep, SimpleNamespace(step=SimpleNamespace(indices=[0])))


class Rank:
    """One rank's session: a wrapped model, and another one with an optimiser."""

    def __init__(self, store: HashStore, rank: int, world: int = 2, wraps: bool = True) -> None:
        self.current = CurrentStep(world)
        self.beside: list[Rank] = []  # this rank's other sessions, zipped into the same loop
        self.wrapped, self.other = nn.Linear(3, 2), nn.Linear(2, 1)
        models = [SingleProcess(self.wrapped, self.current)] if wraps else []
        self.knows = UnwrappedModels(self.current, models, store, rank)
        self.optimiser = torch.optim.SGD(self.other.parameters(), 0.1)

    def steps(
        self,
        gradient: Tensor | float | None,
        optimiser: torch.optim.Optimizer | None = None,
        clip: bool = False,
        reduces: bool = True,
    ) -> None:
        """A step of the loop, in which all gradients are this number, or this tensor."""
        optimiser = optimiser or self.optimiser
        given = [p for group in optimiser.param_groups for p in group["params"]]
        for p in given:
            p.grad = None if gradient is None else torch.zeros_like(p) + gradient
        if clip:
            nn.utils.clip_grad_norm_(given, 1.0)
        sessions = [self, *self.beside]
        for session in sessions:
            session.current.enter(IN_A_STEP)
            session.knows.look()
        for session in sessions:
            session.knows.stepping(optimiser, reduces=reduces)
        for session in sessions:
            session.current.enter(None)


Make = Callable[..., Rank]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def make(store: HashStore) -> Iterator[Make]:
    with ExitStack() as made:

        def rank(number: int, **given: bool | int) -> Rank:
            new = Rank(store, number, **given)
            made.callback(new.knows.close)
            return new

        yield rank


@pytest.fixture
def ranks(make: Make) -> list[Rank]:
    return [make(0), make(1)]


def train(ranks: list[Rank], *steps: tuple[float | None, float | None]) -> None:
    """Steps with these gradients of each rank, and one more look."""
    for of_ranks in steps:
        for rank, gradient in zip(ranks, of_ranks, strict=True):
            rank.steps(gradient)
    ranks[0].knows.look()


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, 2.0)],
        [(1.0, 2.0), (2.0, 3.0)],
        [(0.0, 0.0), (1.0, 2.0)],  # the first gradients are 0, not there, or infinite
        [(None, None), (1.0, 2.0)],
        [(torch.inf, 2.0), (1.0, 3.0)],
        [(torch.nan, torch.nan), (1.0, 2.0)],
    ],
    ids=str,
)
def test_a_model_whose_gradients_differ_is_told_of_once(
    ranks: list[Rank], steps: list[tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    train(ranks, *steps)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "SGD with 2 parameters, the first of shape [1, 2], steps a model that was not passed "
        "to session.wrap()"
    )
    assert "discriminator = session.wrap(discriminator)" in record.getMessage()


def test_gradients_that_are_clipped_to_one_norm_are_compared(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    for number, rank in enumerate(ranks):
        optimiser = torch.optim.SGD([rank.other.weight], 0.1)
        rank.steps(torch.tensor([1.0, 2.0 + 8.0 * number]), optimiser, clip=True)
    ranks[0].knows.look()
    assert len(caplog.records) == 1


def test_optimisers_that_look_alike_are_compared_each(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """Of two discriminators of the same shape, the script reduces one itself."""
    for _ in range(2):
        others = [nn.Linear(2, 1) for _ in ranks]
        for number, rank in enumerate(ranks):
            rank.steps(1.0)
            rank.steps(1.0 + number, torch.optim.SGD(others[number].parameters(), 0.1))
        ranks[0].knows.look()
        assert len(caplog.records) == 1, "optimisers of the same words are named once"


def test_optimisers_made_in_each_step_leave_little_in_the_store(
    ranks: list[Rank], store: HashStore
) -> None:
    for number, rank in enumerate(ranks):
        for _ in range(50):
            other = nn.Linear(2, 1)
            rank.steps(1.0 + number, torch.optim.SGD(other.parameters(), 0.1))
    assert store.num_keys() <= 2 * 8 + 1  # HashStore counts one of its own


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, 1.0), (2.0, 2.0)],  # reduced by the script or by its own DDP
        [(1.0, None)],  # on one rank only
        [(None, None)],  # frozen
    ],
    ids=str,
)
def test_what_does_not_train_apart_is_not_told_of(
    ranks: list[Rank], steps: list[tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    train(ranks, *steps)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["wrapped", "tensor", "sibling"])
@pytest.mark.parametrize("differ", [False, True])
def test_an_optimiser_of_something_else(
    ranks: list[Rank], make: Make, kind: str, differ: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the wrapped model, of made-up inputs, or of a model that another session wraps."""
    siblings = [make(0), make(1)]
    for number, rank in enumerate(ranks):
        rank.beside = [siblings[number]]
        parameters: dict[str, list[Tensor]] = {
            "wrapped": list(rank.wrapped.parameters()),
            "tensor": [torch.zeros(3, requires_grad=True)],
            "sibling": list(siblings[number].wrapped.parameters()),
        }
        optimiser = torch.optim.SGD(parameters[kind], 0.1)
        rank.steps(1.0 + number * differ, optimiser)
    ranks[0].knows.look()
    assert len(caplog.records) == (differ and kind != "tensor")
    assert "was not passed to session.wrap()" not in caplog.text
    assert "they were not reduced" in caplog.text or not caplog.records


def test_under_a_relaxed_policy_each_rank_has_its_own_gradients(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    for number, rank in enumerate(ranks):
        optimiser = torch.optim.SGD(rank.wrapped.parameters(), 0.1)
        rank.steps(1.0 + number, optimiser, reduces=False)
    ranks[0].knows.look()
    assert not caplog.records


def test_parameters_that_share_an_optimiser_with_the_wrapped_model_are_seen(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    for number, rank in enumerate(ranks):
        both = [*rank.wrapped.parameters(), *rank.other.parameters()]
        rank.steps(float(number + 1), torch.optim.AdamW(both))
    ranks[0].knows.look()
    assert "AdamW with 2 parameters" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_gradients_of_any_type_are_compared(
    ranks: list[Rank], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    for number, rank in enumerate(ranks):
        parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
        rank.steps(6e4 + 1e3 * number, torch.optim.SGD([parameter], 0.1))  # fp16 ends at 65504
    ranks[0].knows.look()
    assert len(caplog.records) == 1


def test_sparse_gradients_are_compared(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    for number, rank in enumerate(ranks):
        embedding = nn.Embedding(8, 2, sparse=True)
        (embedding(torch.tensor([1, 1, 3])) * (number + 1)).sum().backward()
        rank.current.enter(IN_A_STEP)
        rank.knows.stepping(torch.optim.SparseAdam(list(embedding.parameters())))
        rank.current.enter(None)
    ranks[0].knows.look()
    assert len(caplog.records) == 1


def test_a_session_without_models_refuses(make: Make) -> None:
    with pytest.raises(PacelineError, match=r"model = session.wrap\(model\) in place of"):
        make(0, wraps=False).steps(1.0)


def test_in_a_single_process_nothing_is_wrong(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    alone = make(0, world=1, wraps=False)
    alone.steps(1.0)
    alone.steps(2.0)
    assert not caplog.records


def test_a_model_of_a_session_that_is_in_no_step_counts_as_unwrapped(make: Make) -> None:
    """Its gradients would not be weighted."""
    data, earlier = make(0, wraps=False), make(0)
    data.beside = [earlier]
    data.steps(1.0, torch.optim.SGD(earlier.wrapped.parameters(), 0.1))
    data.beside = []
    with pytest.raises(PacelineError, match="no model was given"):
        data.steps(1.0, torch.optim.SGD(earlier.wrapped.parameters(), 0.1))


def test_beside_a_session_that_wraps_a_model_one_without_models_refuses_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimiser also has a parameter of no wrapped model. One of the sessions warns."""
    loaders = [make(rank, wraps=False) for rank in range(2)]
    trainers, others = ([make(rank) for rank in range(2)] for _ in range(2))
    for number, rank in enumerate(loaders):
        rank.beside = [trainers[number], others[number]]
        both = [*trainers[number].wrapped.parameters(), *rank.other.parameters()]
        rank.steps(1.0 + number, torch.optim.SGD(both, 0.1))
    for rank in (loaders[0], trainers[0], others[0]):
        rank.knows.look()
    assert len(caplog.records) == 2  # of the wrapped model's parameters, and of the other one
