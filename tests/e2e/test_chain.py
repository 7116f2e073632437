"""A chain of switches among all synchronous presets, on four real ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline_backend.server.stack import Stack
from support import chain_script
from support.chains import random_chain, run_chain, synchronous

pytestmark = pytest.mark.ranks


@pytest.mark.timeout(1200)
def test_switches_among_all_presets(stack: Stack, tmp_path: Path) -> None:
    known = synchronous()
    names = random_chain(known, len(known), seed=7)
    assert set(names) == set(known)
    assert all(name != next_ for name, next_ in itertools.pairwise(names))
    ran = run_chain(stack, names, tmp_path)

    assert ran.policies == names
    assert ran.effective_steps == sorted(ran.effective_steps)
    assert all(ran.planned.values()), "a policy without a plan"

    assert ran.coverage["exact"] is True
    assert all(epoch["used"] == chain_script.SAMPLES for epoch in ran.coverage["epochs"])

    # Of each step, so also on both sides of each switch; float32.
    assert sorted(ran.errors) == list(range(ran.steps))
    assert set(ran.effective_steps) <= set(ran.errors)
    assert max(ran.errors.values()) <= 1e-5

    assert ran.replay.first_difference is None
    assert ran.replay.identical == sum(ran.planned.values())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_gradients_between_relaxed_presets(stack: Stack, tmp_path: Path) -> None:
    """All-reduced steps are those of one process, whatever the replicas went through before."""
    names = ["bsp", "rna", "chronica", "local-sgd", "paceline"]
    ran = run_chain(stack, names, tmp_path, steps=12)

    assert ran.policies == names
    assert ran.coverage["exact"] is True
    assert ran.replay.first_difference is None
    assert ran.replay.identical == sum(ran.planned.values())

    bounds = [*ran.effective_steps, ran.steps]
    parts = [set(range(*bound)) for bound in itertools.pairwise(bounds)]
    assert set(ran.errors) == parts[0] | parts[2] | parts[4]
    assert max(ran.errors.values()) <= 1e-5
    assert ran.losses[-1] < ran.losses[0]
