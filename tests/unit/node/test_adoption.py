"""Which nodes train together that somebody started by themselves."""

from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline.node.duty import Place, place

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def test_the_tasks_of_a_step_are_the_nodes_of_a_run() -> None:
    first = place({**STEP, "SLURM_PROCID": "0", "SLURM_CLUSTER_NAME": "c"}, None, None)
    second = place({**STEP, "SLURM_PROCID": "1", "SLURM_CLUSTER_NAME": "c"}, None, None)
    assert first == Place("slurm-c-4711.0", "4711.0.0", 2)
    assert second == Place("slurm-c-4711.0", "4711.0.1", 2)


def test_another_step_and_a_job_that_is_queued_again_are_other_runs() -> None:
    own = place(STEP, None, None)
    other = place({**STEP, "SLURM_STEP_ID": "1"}, None, None)
    again = place({**STEP, "SLURM_RESTART_COUNT": "1"}, None, None)
    assert len({each.key for each in (own, other, again)}) == 3
    assert len({each.slot for each in (own, other, again)}) == 3
    assert place({**STEP, "SLURM_RESTART_COUNT": "0"}, None, None) == own


def test_the_script_of_a_job_is_one_node() -> None:
    env = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert place(env, None, None) == Place("slurm-4711", "4711", 1)


def test_each_call_in_the_script_of_a_job_is_a_run() -> None:
    env = {"SLURM_JOB_ID": "4711"}
    first, second = (place(env, None, None, alone=True) for _ in range(2))
    assert len({first.key, second.key}) == len({first.slot, second.slot}) == 2
    assert first.slot.startswith("4711.")
    assert first.nodes == 1
    assert place(env, "mine", None, alone=True).key == "mine"


def test_what_is_given_counts() -> None:
    assert place(STEP, "mine", "left") == Place("mine", "left", 2)
    assert place({}, "mine", None) == Place("mine", "mine", 1)
    with pytest.raises(InputError, match="--run-key: give all nodes of the run the same"):
        place({}, None, "left")
