"""Engines: backends that have a queue, and nodes of their own, such as Slurm.

Somebody else decides when and where an engine's job runs. So the control plane asks the engine for
a job, whose slots each run ``paceline node --run RUN``, one per node. That command is an agent that
looks after this one run: it asks the control plane to take part, and is launched like any node.

What to do is decided in one place, `control.engines`, by comparing runs with `Engine.look`. An
engine only has the verbs. Each may be repeated at any time, since a worker may be killed between
any two of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import redis

from paceline.core.errors import PacelineError
from paceline_backend.backends.base import (
    Credentials,
    NewRunError,
    answering,
    check_nodes,
    check_path,
    launch_on,
    options_of,
)
from paceline_backend.store.new_runs import NewRun

Word = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f]*$", max_length=1000)]


class EngineAwayError(PacelineError):
    """The engine does not answer at present. Nothing about its jobs is known."""


class EngineRefusedError(PacelineError):
    """The engine does not take a job. Asking again would not help; the message says why."""


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run may ask of any engine."""

    server: Annotated[
        Word,
        msgspec.Meta(
            description="URL by which the nodes reach this server; default: as in the request"
        ),
    ] = ""


@dataclass(frozen=True)
class Facts:
    """What an engine says about itself."""

    reachable: bool
    version: str | None = None
    problem: str | None = None  # why it cannot be reached


@dataclass(frozen=True)
class Order:
    """A job to submit.

    On each of its nodes it runs ``paceline node --run RUN --slot SLOT --host HOST``. HOST is what
    the engine calls the machine, for `cordon`; it may be left out.
    """

    label: str  # at most 63 letters, digits and dots; the engine keeps it with the job
    run: str  # public id
    nodes: int  # all at once, or none
    nproc: int  # ranks on each node
    cwd: str  # a directory that the nodes have
    options: msgspec.Struct
    server: str  # for PACELINE_SERVER
    token: str = field(repr=False)  # for PACELINE_TOKEN; other users must not see it
    avoid: Sequence[str] = ()  # machines that must not be given, as the engine calls them


@dataclass(frozen=True)
class Job:
    """A job of ours, as the engine has it."""

    label: str
    ref: str  # the engine's own name of it
    state: Literal["queued", "running", "ended"]
    reason: str = ""  # why it waits or how it ended, in the engine's words
    cancelled: bool = False  # it ended as somebody wanted that: then its run is stopped


class Engine(ABC):
    """A `Backend` whose runs are jobs of an engine. Objects keep no state."""

    name: ClassVar[str]
    title: ClassVar[str]  # in messages
    plans_itself: ClassVar[bool] = False
    options: ClassVar[type[msgspec.Struct]]
    # Ended jobs stay known for hours: somebody has removed one that is gone.
    keeps_ended: ClassVar[bool] = False

    @abstractmethod
    def facts(self) -> Facts:
        """Whether the engine answers. Raises nothing; takes seconds at most."""

    @abstractmethod
    def submit(self, order: Order) -> str:
        """Submits a job; the engine's name of it. Called when `look` has no job of this label.

        Raises:
            EngineAwayError: whether the engine has the job is not known; a later look tells.
            EngineRefusedError: it does not take such a job.
        """

    @abstractmethod
    def look(self, prefix: str) -> Sequence[Job]:
        """All jobs whose label begins like this, in one question; ended ones as long as known.

        Raises:
            EngineAwayError: the engine does not answer.
        """

    @abstractmethod
    def stop(self, refs: Sequence[str]) -> None:
        """Ends jobs, whose processes get SIGTERM first; jobs that have ended are no error.

        Raises:
            EngineAwayError: the engine does not answer; the caller asks again.
        """

    def cordon(self, host: str, reason: str | None) -> None:
        """Lets a machine get no further job; jobs on it go on. It may be said again.

        Args:
            host: as a node of it said with ``--host``.
            reason: who wants that and why, to be shown to the engine's users; None: the cordon is
                lifted. One that somebody else set in the engine stays.

        Raises:
            EngineAwayError: the engine does not answer; the caller says it again.
            EngineRefusedError: it does not do that.
        """
        raise EngineRefusedError(f"{self.title} cannot cordon nodes")

    def cordon_as(self, plane: str, host: str, reason: str | None) -> None:
        """As `cordon`, for one of several control planes that may share the engine.

        An engine that keeps with a cordon whose it is overrides this, and lets no control plane
        lift another's.

        Args:
            plane: id of the control plane.
            host: see `cordon`.
            reason: see `cordon`.
        """
        self.cordon(host, reason)

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuses what no job could do, and options that the engine does not have."""
        options_of(self.options, new.backend_options)
        check_nodes(new)
        if not launch:
            raise NewRunError("launch", f"{self.title} starts the run: leave it out")
        if new.node is not None:
            raise NewRunError("node", f"{self.title} chooses the nodes: leave it out")
        if new.env:
            raise NewRunError(
                "env", "values are not stored, and the job starts later: set them in the script"
            )
        check_path(new)

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Of a run that has nodes already: those that answer. Others come when they come."""
        return answering(new, nodes)

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Launches on nodes that are there; the reconciler sees to jobs."""
        launch_on(bus, run, new, credentials, new.where)


def directory(new: NewRun) -> str:
    """Where a run's jobs begin: a directory that its nodes have."""
    return new.cwd or str(PurePath(new.script).parent)
