"""What a training backend does, and when each of its methods is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import redis

from paceline import observation
from paceline.core.errors import PacelineError
from paceline.wire import COMMANDS_LENGTH, OBSERVED, Launch, commands
from paceline.wire.bus import publish
from paceline.wire.sealing import Secrets, seal
from paceline_backend.server.keys import Keys
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.refusals import MOST_RANKS

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True)
class Credentials:
    """What a run's processes need to take part on the bus, and to believe what they are told."""

    keys: Keys
    bus: str = field(repr=False)  # URL, with the run's own user if it has one


class NewRunError(PacelineError):
    """A field of a new run does not fit its backend. The message says how to mend it.

    Args:
        field: its name.
        message: what is wrong.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NoNodeError(PacelineError):
    """No node can start the run at present."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a backend that has none."""


class Backend(Protocol):
    """One kind of place where runs train. Objects keep no state: runs stand in the store."""

    name: ClassVar[str]  # in the column `runs.backend`
    plans_itself: ClassVar[bool]  # whether no controller plans its runs
    # What a run may ask of it. Each field has a default; its JSON Schema is shown by REST.
    options: ClassVar[type[msgspec.Struct]]

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Called first, before anything is written or published.

        Args:
            new: the run that somebody asks for.
            launch: whether the control plane starts it; else who asks does.

        Raises:
            NewRunError: the run does not fit this backend.
        """

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Called within the transaction that records the run, if the control plane starts it.

        Args:
            new: the run; `new.nodes` are those of its launch before.
            nodes: rows of `store.nodes.listed`.

        Returns:
            The nodes that start the run, at most `new.nodes_max`; empty where runs have no node, or
            where it is not known yet which.

        Raises:
            NoNodeError: not enough nodes can.
        """

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Called after the run was recorded, if the control plane starts it.

        Args:
            bus: answers.
            run: public id of the run.
            new: the run, with the nodes that `place` chose: `node` is the only one, else `nodes`.
            credentials: of the run.

        Raises:
            redis.RedisError: the bus is away; the caller fails the run.
        """


def options_of(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The options of a run.

    Args:
        kind: `Backend.options`.
        given: as somebody gave them.

    Raises:
        NewRunError: one is unknown, or its value is not legal; names the option.
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
    """Refuses what no number of nodes can do.

    Raises:
        NewRunError: there are more nodes at least than at most, or too many ranks.
    """
    if new.scenario is not None:
        raise NewRunError("scenario", 'only for backend "simulated"')
    if new.nodes_min > new.nodes_max:
        raise NewRunError("nodes_min", f"{new.nodes_min} is more than nodes_max")
    if new.most_ranks > MOST_RANKS:
        raise NewRunError(
            "nodes_max",
            f"{new.nproc} ranks on {new.nodes_max} nodes are {new.most_ranks:,}: a run has at "
            f"most {MOST_RANKS:,}",
        )


def answering(new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those of a run's nodes that answer; none of a run whose nodes have yet to come.

    Raises:
        NoNodeError: they are too few.
    """
    able = [
        str(node["id"])
        for node in nodes
        if node["alive"] and node["signed"] and node["id"] in new.nodes
    ]
    if new.nodes and len(able) < new.nodes_min:
        raise NoNodeError(f"nodes_min: {new.nodes_min} nodes are needed, {len(able)} are left")
    return able[: new.nodes_max]


def check_path(new: NewRun) -> None:
    """Refuses a script that nodes would look for where they happen to begin.

    Raises:
        NewRunError: neither its path nor `cwd` is absolute.
    """
    if not PurePath(new.cwd or new.script).is_absolute():
        field = "script" if new.cwd is None else "cwd"
        raise NewRunError(field, "give an absolute path that the nodes have")


def launch_on(
    bus: redis.Redis, run: str, new: NewRun, credentials: Credentials, nodes: Iterable[str]
) -> None:
    """Tells the agents of some nodes to launch a run; what is secret, only each agent can read.

    Raises:
        redis.RedisError: the bus is away.
    """
    for node in nodes:
        message = _launch(run, new, credentials, node)
        key = credentials.keys.of_node(node)
        publish(bus, commands(node), message, run, maxlen=COMMANDS_LENGTH, key=key)


def _launch(run: str, new: NewRun, credentials: Credentials, node: str) -> Launch:
    env, sealed = dict(new.env), b""
    if new.policy == OBSERVED:
        env[observation.VARIABLE] = "1"
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
