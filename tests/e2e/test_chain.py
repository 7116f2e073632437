"""A chain of switches among all synchronous presets, on four real ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline_backend.stack import Stack
from support import chain_script
from support.chains import random_chain, run_chain, synchronous

pytestmark = pytest.mark.ranks


@pytest.mark.timeout(240)
def test_switches_among_all_presets(stack: Stack, tmp_path: Path) -> None:
    """`benchmarks/chain.py` is the same with more of them."""
    known = synchronous()
    names = random_chain(len(known), seed=7)
    assert set(names) == set(known)
    assert all(one != next_ for one, next_ in itertools.pairwise(names))
    ran = run_chain(stack, names, tmp_path)

    assert ran.policies == names
    assert ran.effective_steps == sorted(ran.effective_steps)
    assert all(ran.planned.values()), "a policy without a plan"

    assert ran.coverage["exact"] is True
    assert all(epoch["used"] == chain_script.SAMPLES for epoch in ran.coverage["epochs"])

    # Of each step, so also on both sides of each switch; float32.
    assert sorted(ran.errors) == list(range(len(ran.errors)))
    assert set(ran.effective_steps) <= set(ran.errors)
    assert max(ran.errors.values()) <= 1e-5

    assert ran.replay.first_difference is None
    assert ran.replay.identical == sum(ran.planned.values())
