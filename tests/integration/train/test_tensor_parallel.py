"""Groups of ranks that split a model and share each batch: the update is that of one process."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.wire.synchronisation import convert
from support import fsdp, tensor_parallel
from support.ranks import Ranks
from support.tensor_parallel import TP, Log

pytestmark = pytest.mark.ranks
WORLD = 4
GROUPS = WORLD // TP
SAMPLES = 48
BOUND = 1e-5  # docs/invariants.md, invariant 2
SWITCHING = partial(fsdp.by_presets, ["bsp", "paceline", "chronica"])


def check(logs: list[Log], epochs: int) -> None:
    """The invariants: gradients, parameters, coverage, and groups that share batches."""
    for rank, log in enumerate(logs):
        assert log.place == (rank // TP, GROUPS)
        assert max(log.errors) <= BOUND
        assert log.parameters <= BOUND
        assert log.alike
        assert len(log.errors) == epochs * SAMPLES // 8
        assert sorted(log.every) == sorted([*range(SAMPLES)] * epochs)
    assert logs[0].parts == logs[1].parts != logs[2].parts == logs[3].parts


@pytest.mark.parametrize(
    "options",
    [{}, {"replicas": True}, {"sequence": True}, {"loss_mean": "samples", "coast_steps": 1}],
    ids=["fsdp", "replicas", "sequence", "steps"],
)
def test_presets_are_switched_between(ranks: Ranks, options: dict[str, object]) -> None:
    """Segments of two steps, each by the next preset; the groups' measured speeds are 1 : 2."""
    logs: list[Log] = ranks.run(partial(tensor_parallel.train, SWITCHING, 2, **options))
    check(logs, 2)
    assert set(logs[0].policies) == {"bsp", "paceline", "chronica"}
    assert logs[1].policies == []  # rank 0 plans for all
    assert any(len(a) != len(b) for a, b in zip(logs[0].parts, logs[2].parts, strict=True))


def test_groups_train_without_a_control_plane(ranks: Ranks) -> None:
    check(ranks.run(partial(tensor_parallel.train, contextlib.nullcontext, 1)), 1)


def test_one_group_of_all_ranks_has_whole_batches(ranks: Ranks) -> None:
    for log in ranks.run(partial(tensor_parallel.train, contextlib.nullcontext, 1, groups=1)):
        assert log.place == (0, 1)
        assert max([*log.errors, log.parameters]) <= BOUND
        assert sorted(log.every) == [*range(SAMPLES)]


def test_a_group_takes_as_long_as_its_slowest_rank(ranks: Ranks) -> None:
    """Rank 3 is slow, and rank 2 speaks for their group."""
    of = ranks.run(tensor_parallel.timed, 3)
    assert of[1] == of[3] == []
    assert of[0] == [pytest.approx((0.01, 0.01))] * 3
    assert of[2] == [pytest.approx((0.1, 0.2))] * 3


@pytest.mark.parametrize("limits", [None, [14.0, 16.0]])
def test_a_token_budget_is_that_of_all_groups(ranks: Ranks, limits: list[float] | None) -> None:
    budget = {"global_batch": None, "token_budget": 16.0, "loss_mean": "samples"}
    budget |= {"token_limits": limits}
    for log in ranks.run(partial(tensor_parallel.train, contextlib.nullcontext, 1, **budget)):
        assert max([*log.errors, log.parameters]) <= BOUND
        assert log.alike
        assert sorted(log.every) == [*range(SAMPLES)]


def test_batchnorm_is_synchronised_over_groups(ranks: Ranks) -> None:
    check(ranks.run(partial(tensor_parallel.train, SWITCHING, 1, batchnorm=True)), 1)


def test_a_relaxed_policy_leaves_gradients_reduced(ranks: Ranks) -> None:
    rounds = {"quorum": 1, "staleness": None, "lead": 3, "mean": False}
    chain = [convert("partial", rounds), convert("averaging", {"every": 3})]
    logs = ranks.run(partial(tensor_parallel.train, partial(fsdp.by_synchronisers, chain), 2))
    check(logs, 2)
    for log in logs:
        assert not log.relaxed
        assert "sharded by fully_shard" in log.fallback


def test_checkpoints_are_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Training goes on in the same groups, and without any."""
    apart = ranks.run(tensor_parallel.save_and_go_on, str(tmp_path / "whole"), 2)
    first = ranks.run(tensor_parallel.save_and_go_on, str(tmp_path / "parts"), 1)
    began, ended = ranks.run(tensor_parallel.save_and_go_on, str(tmp_path / "parts"), 2)[0]
    assert torch.equal(began, first[0][1])
    assert torch.allclose(ended, apart[0][1], atol=1e-6)
    again = partial(tensor_parallel.save_and_go_on, str(tmp_path / "parts"), 2, splits=False)
    for began, _ in ranks.run(again):
        assert torch.equal(began, ended)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("uneven_steps", "mesh and uneven_steps cannot be combined"),
        ("micro_batches", "mesh and micro_batches cannot be combined"),
        ("stream", r"mesh and paceline\.data\.Stream cannot be combined"),
        ("no mesh", r"mesh=2: give the data-parallel part"),
        ("some", "mesh is "),
        ("profile", "profile: ranks of a group compute each batch together"),
        ("plain", "the model is not sharded, but ranks share batches"),
        ("split only", "the model is not sharded, but ranks share batches"),
        ("stages", r"hold parameters of different names"),
        ("apart", r"parameter 0\.weight differs between ranks \[\d, \d\], which share each batch"),
        ("other part", r"is sharded over ranks \[.*\], but the data-parallel ranks"),
    ],
)
def test_what_would_train_wrongly_is_refused(ranks: Ranks, kind: str, why: str) -> None:
    for text in ranks.run(tensor_parallel.refused, kind):
        assert re.search(why, text), text
