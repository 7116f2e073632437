"""A node that serves a single run: how it joins the run, and when it may end.

`paceline node --run RUN` joins a run for which an engine started this process. The operator starts
`paceline node SCRIPT` on each node of a job: `place` derives the run's key from Slurm's variables,
and `adopt` registers the process with the server. The first process with a key creates the run.
Then the agent serves the run as a `Duty`: while the node has no processes of the run, it asks the
control plane whether the run still needs the node.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.core.errors import InputError, PacelineError
from paceline.node.client import Client, ServerUnreachable
from paceline.node.supervisor import check
from paceline.wire import Launch, State

_log = logging.getLogger(__name__)

# Seconds between two requests that ask the server whether the run still needs the node.
_ASK_S = 2.0
# The node gives up after this many seconds without an answer and without processes of the run.
GIVE_UP_S = 600.0


@dataclass(frozen=True)
class Place:
    """The group of nodes that train together, and this process's slot among them."""

    # Name of the group, which is the key of the run: equal on all nodes of the run, and different
    # for each run.
    key: str
    # Name of the slot: different for each of several nodes on one machine.
    slot: str
    nodes: int


def place(
    env: Mapping[str, str], key: str | None, slot: str | None, *, alone: bool = False
) -> Place:
    """Return the group and slot of this process, from `key`, `slot` and Slurm's variables in `env`.

    Each step of a Slurm job is a run, and each requeue of a job starts another run. `alone` is True
    if the operator gave no number of nodes. Then a process that was started without srun is a run
    of its own, on one node. Raise an InputError if there is no key.
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
            "--run-key: give all nodes of the run the same key, which no other run has; in a Slurm "
            "job, the key can be left out"
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


class Duty:
    """The membership of a node in one run, which ends when the run no longer needs the node.

    `host` is the engine's name of this machine; empty: unknown. With `shows_output`, the agent
    copies the output of rank 0 to its own output, if rank 0 is on this node.
    """

    def __init__(
        self, client: Client, run: str, node: str, host: str = "", *, shows_output: bool = False
    ) -> None:
        self.shows_output = shows_output
        self._client = client
        self._path = f"/runs/{run}/nodes/{node}/join"
        self._run = run
        self._params = {"host": host} if host else None
        self._ask_at = 0.0
        self._answered_at = time.monotonic()
        self._problem = ""
        # Exit code of the agent: 0 once the run has finished, or the node was asked to leave it.
        self.exit_code = 1

    def is_done(self) -> bool:
        """Return True if the node may end, because the run no longer needs it.

        Call this often while the node has no processes of the run. The server is asked only every
        few seconds; in between, the result is False.
        """
        if time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_S
        try:
            answer = self._client.call("POST", self._path, params=self._params)
        except ServerUnreachable as error:
            return self._unanswered(error)
        # The server rejects this node or its token, so a retry does not help.
        except PacelineError as error:
            _log.error("run %s: %s", self._run, error)
            return True
        self._answered_at, self._problem = time.monotonic(), ""
        if answer["needed"]:
            return False
        _log.info("run %s does not need this node: %s", self._run, answer["message"])
        state = State(answer["state"])
        self.exit_code = 0 if state is State.FINISHED or not state.final else 1
        return True

    def busy(self) -> None:
        """Record that the node has processes of the run, which postpones giving up."""
        self._answered_at = time.monotonic()

    def _unanswered(self, error: PacelineError) -> bool:
        if self._problem != (problem := str(error)):
            self._problem = problem
            _log.warning("run %s: %s; retrying", self._run, problem)
        return time.monotonic() - self._answered_at > GIVE_UP_S
