"""Interface of training backends, and checks and helpers that several backends share.

`requests.launch` calls the methods of a `Backend` in this order: `check`, `place`, `start`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import redis

from paceline import observation
from paceline.core.errors import PacelineError
from paceline.planning.policy_in_force import FIRST_POLICY
from paceline.wire import COMMANDS_LENGTH, OBSERVED, Launch, commands
from paceline.wire.bus import publish
from paceline.wire.sealing import Secrets, seal
from paceline_backend.server.keys import Keys
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.refusals import MOST_RANKS

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True)
class Credentials:
    """Keys and bus URL with which a run's processes use the bus and verify signed messages.

    If the run has a bus user of its own, the URL contains this user and its password.
    """

    keys: Keys
    bus: str = field(repr=False)


class NewRunError(PacelineError):
    """A field of a new run does not suit its backend.

    Args:
        message: describes the error and how to fix it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NoNodeError(PacelineError):
    """No node can start the run now."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Empty options, for backends whose runs have no options."""


class Backend(Protocol):
    """Starts the processes of runs. A backend keeps no state, because runs are in the database.

    Attributes:
        name: value of the column `runs.backend`.
        plans_itself: True if the backend's runs are planned without a controller.
        options: struct of the options that a run of this backend has. Each field has a default.
            REST shows the struct's JSON Schema.
    """

    name: ClassVar[str]
    plans_itself: ClassVar[bool]
    options: ClassVar[type[msgspec.Struct]]

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Validate a new run. Called first, before anything is written or published.

        Args:
            launch: True if the control plane starts the run, False if the caller does.

        Raises:
            NewRunError: the run does not suit this backend.
        """

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Choose the nodes of a run.

        Called in the transaction that records the run, if the control plane starts the run.

        Args:
            new: the run. `new.nodes` are the nodes of its previous launch.
            nodes: rows of `store.nodes.listed`.

        Returns:
            The ids of the nodes that must start the run, at most `new.nodes_max`. Empty if runs of
            this backend have no nodes, or if the nodes are not known yet.

        Raises:
            NoNodeError: not enough nodes can start the run.
        """

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Start a run's processes. Called after the run and its nodes are recorded.

        Args:
            bus: client of a bus that has answered.
            run: public id of the run.
            new: the run, with the nodes that `place` chose: a single node in `node`, several nodes
                in `nodes`.

        Raises:
            redis.RedisError: the bus is unavailable.
        """


def options_of(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Convert a run's options to `kind`, which is `Backend.options`.

    Raises:
        NewRunError: an option is unknown or has an invalid value.
    """
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        path = where.rstrip("`")
        raise NewRunError(f"backend_options{path}", _sentence(what, kind)) from None


def _sentence(what: str, kind: type[msgspec.Struct]) -> str:
    if "unknown field" not in what:
        return what
    known = ", ".join(field.name for field in msgspec.structs.fields(kind)) or "none"
    return f"{what}; the options are: {known}"


def check_nodes(new: NewRun) -> None:
    """Validate a run's numbers of nodes and ranks.

    Raises:
        NewRunError: `nodes_min` exceeds `nodes_max`, there are too many ranks, or the run has a
            scenario.
    """
    if new.scenario is not None:
        raise NewRunError("scenario", 'only backend "simulated" uses a scenario: omit it')
    if new.nodes_min > new.nodes_max:
        raise NewRunError("nodes_min", f"{new.nodes_min} is more than nodes_max, {new.nodes_max}")
    if new.most_ranks > MOST_RANKS:
        raise NewRunError(
            "nodes_max",
            f"{new.nproc} ranks on each of {new.nodes_max} nodes are {new.most_ranks:,} ranks: "
            f"a run has at most {MOST_RANKS:,}",
        )


def answering(new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the run's nodes that answer, at most `nodes_max`; none if no node has joined it yet.

    Raises:
        NoNodeError: fewer than `nodes_min` nodes answer.
    """
    able = [
        str(node["id"])
        for node in nodes
        if node["alive"] and node["signed"] and node["id"] in new.nodes
    ]
    if new.nodes and len(able) < new.nodes_min:
        raise NoNodeError(f"nodes_min: {new.nodes_min} nodes are needed, {len(able)} are available")
    return able[: new.nodes_max]


def check_path(new: NewRun) -> None:
    """Require an absolute path, because the nodes' agents have different working directories.

    Raises:
        NewRunError: `cwd` is not absolute, or it is missing and the script's path is not absolute.
    """
    if not PurePath(new.cwd or new.script).is_absolute():
        field = "script" if new.cwd is None else "cwd"
        raise NewRunError(field, "give an absolute path that exists on the nodes")


def launch_on(
    bus: redis.Redis, run: str, new: NewRun, credentials: Credentials, nodes: Iterable[str]
) -> None:
    """Order each node's agent to launch a run, with secrets that are encrypted for this agent.

    Raises:
        redis.RedisError: the bus is unavailable.
    """
    for node in nodes:
        message = _launch(run, new, credentials, node)
        key = credentials.keys.of_node(node)
        publish(bus, commands(node), message, run, maxlen=COMMANDS_LENGTH, key=key)


def _launch(run: str, new: NewRun, credentials: Credentials, node: str) -> Launch:
    env, sealed = dict(new.env), b""
    if new.policy == OBSERVED:
        env[observation.VARIABLE] = "1"
    # The policy with which rank 0 plans if no controller does. It is left out for a resumed run,
    # whose policy may have been switched.
    elif not new.first_attempt:
        env[FIRST_POLICY] = msgspec.json.encode({new.policy: new.parameters}).decode()
    if new.signed:
        keys = credentials.keys
        sealed = seal(Secrets(env, credentials.bus, keys.of_run(run)), keys.of_node(node))
        env = {}
    return Launch(
        new.script,
        list(new.args),
        new.nproc,
        env,
        new.cwd,
        new.max_restarts,
        new.first_attempt,
        sealed,
        new.nodes_min,
        new.nodes_max,
    )
