"""`bsp` is plain data parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from paceline import policies
from paceline.core.ledger import BatchRules, Ledger
from paceline.policies.solve.order import epoch_order
from support.cluster import Cluster, plaid_like

N, WORLD, BATCH = 96, 4, 16


def cluster(**fields: object) -> Cluster:
    return Cluster(plaid_like(N), np.ones(WORLD), np.zeros(WORLD), BATCH, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [0, 3])
def test_each_rank_gets_what_distributed_sampler_gives_it(epoch: int) -> None:
    plan = cluster(seed=11, epoch=epoch).plan(policies.make("bsp"), steps=6)
    dataset = torch.arange(N)
    for rank in range(WORLD):
        sampler = DistributedSampler(dataset, WORLD, rank, shuffle=True, seed=11)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        ours = np.concatenate([step[rank] for step in plan.assignment.parts])
        assert ours.tolist() == list(sampler)


def test_limits_are_kept_as_in_coasting() -> None:
    """A controller's plan and what the leader does without one are the same training."""
    limits = np.array([2, 16, 5, 16])
    training = Cluster(plaid_like(104), np.ones(WORLD), np.zeros(WORLD), BATCH, seed=7)
    problem = replace(training.problem(9, shuffle=True), limits=limits)
    made, _ = policies.plan(policies.make("bsp"), problem, training.feedback(), shuffle=True)
    assert made.assignment.counts.tolist() == [[2, 5, 5, 4]] * 6 + [[2, 2, 2, 2]]
    ledger = Ledger(0, epoch_order(104, 7, 0), BatchRules(BATCH, limits=limits))
    coasted = ledger.coast(9, WORLD, problem.sizes, [])
    assert [[p.tolist() for p in s] for s in made.assignment.parts] == [
        [p.tolist() for p in s] for s in coasted
    ]


def test_what_a_switch_leaves_keeps_the_epochs_order() -> None:
    training = cluster(seed=3)
    training.run(policies.make("chronica"), 2)
    left = set(np.flatnonzero(training.remaining).tolist())
    plan = training.plan(policies.make("bsp"), 4)
    flat = []
    for step in plan.assignment.parts:
        batch = np.empty(sum(map(len, step)), np.int64)
        for rank, part in enumerate(step):
            batch[rank::WORLD] = part
        flat += batch.tolist()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3)).tolist()
    assert flat == [sample for sample in order if sample in left]
