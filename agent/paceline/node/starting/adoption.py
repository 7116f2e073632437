"""`paceline node SCRIPT`: a run that an operator starts on nodes of their own."""

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
    """The group of nodes that train together, and this process's slot among them."""

    # The same on all nodes of the run, and on no others.
    key: str
    # Different on each node of a machine.
    slot: str
    nodes: int


def place(
    env: Mapping[str, str], key: str | None, slot: str | None, *, alone: bool = False
) -> Place:
    """Return the place of this process, from the given values and Slurm's variables in `env`.

    Each step of a job is a run; each requeue of a job by Slurm starts another run. In the job's
    script and on its command line, without srun, each call is a run on one node if it is `alone`:
    the operator gave no other nodes. Raise an InputError if there is no key.
    """
    job, nodes = env.get("SLURM_JOB_ID"), 1
    if job is not None:
        again = env.get("SLURM_RESTART_COUNT", "0")
        job = job if again == "0" else f"{job}r{again}"
        step = env.get("SLURM_STEP_ID")
        # The process runs in the job's script, without srun.
        if step is None:
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
            "--run-key: give all nodes of the run the same key, and no other run; not needed in a "
            "Slurm job"
        )
    return Place(key, slot or key, nodes)


def check_launch(launch: Launch) -> None:
    """Raise an InputError for a launch that cannot work on this node."""
    check(msgspec.structs.replace(launch, nodes_min=1, nodes_max=1))


def adopt(client: Client, where: Place, launch: Launch, choice: Mapping[str, Any]) -> Any:
    """Register this process at the server; return the run's id and a token for its nodes.

    The client's token must be allowed to start runs. `choice` has further fields of ``POST
    /adoptions``, such as `policy`.
    """
    names = ("script", "args", "nproc", "cwd", "max_restarts", "nodes_min", "nodes_max")
    body = {name: getattr(launch, name) for name in names} | {"key": where.key, **choice}
    return client.call("POST", "/adoptions", body)
