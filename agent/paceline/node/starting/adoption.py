"""`paceline node SCRIPT`: a run that somebody starts on nodes of their own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.core.errors import InputError
from paceline.node.client import Client
from paceline.node.supervisor import check
from paceline.wire import Launch


@dataclass(frozen=True)
class Place:
    """Which nodes train together, and which of them this process is."""

    key: str  # the same on all nodes of the run, and on no others
    slot: str  # another on each node of a machine
    nodes: int


def place(
    env: Mapping[str, str], key: str | None, slot: str | None, *, alone: bool = False
) -> Place:
    """The place of this process, by what was given, and by Slurm's variables.

    Each step of a job is a run; so is each time that Slurm queues a job again. In the job's script
    and on its command line, without srun, each call is a run on one node.

    Args:
        env: variables.
        key: given; None: what Slurm says.
        slot: given; None: what Slurm says, else the key.
        alone: nobody has said that the run has other nodes.

    Raises:
        InputError: there is no key.
    """
    job, nodes = env.get("SLURM_JOB_ID"), 1
    if job is not None:
        again = env.get("SLURM_RESTART_COUNT", "0")
        job = job if again == "0" else f"{job}r{again}"
        step = env.get("SLURM_STEP_ID")
        if step is None:  # in the job's script, without srun
            own = f"{job}.{secrets.token_hex(3)}" if alone else job
            if alone and not key:
                key = f"slurm-{own}"
        else:
            job = f"{job}.{step}"
            own = f"{job}.{env.get('SLURM_PROCID', '0')}"
            nodes = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        key = key or "-".join(filter(None, ("slurm", env.get("SLURM_CLUSTER_NAME"), job)))
        slot = slot or own
    if not key:
        raise InputError(
            "--run-key: give all nodes of the run the same, that no other run has; within a job of "
            "Slurm that is not needed"
        )
    return Place(key, slot or key, nodes)


def check_launch(launch: Launch) -> None:
    """Refuses a launch that cannot work on this node.

    Raises:
        InputError: as the supervisor's check.
    """
    check(msgspec.structs.replace(launch, nodes_min=1, nodes_max=1))


def adopt(client: Client, where: Place, launch: Launch, choice: Mapping[str, Any]) -> Any:
    """Asks the server for the run of a key; the run's id, and a token for its nodes.

    Args:
        client: of the server; its token may start runs.
        where: this process's place.
        launch: what to run.
        choice: further fields of ``POST /adoptions``, such as `policy`.

    Raises:
        InputError: the server refuses; the message holds its reason.
        PacelineError: it does not answer.
    """
    names = ("script", "args", "nproc", "cwd", "max_restarts", "nodes_min", "nodes_max")
    body = {name: getattr(launch, name) for name in names} | {"key": where.key, **choice}
    return client.call("POST", "/adoptions", body)
