"""Engines: backends with a queue and nodes of their own, such as Slurm.

An engine decides when and where its jobs run. So the control plane submits a job, which runs the
command ``paceline node --run RUN`` once on each of its nodes. This command is an agent for a single
run: it requests to take part in the run (`requests.enlist`), and the run is then launched on it as
on any other node.

`control.engines` decides which jobs to submit or stop, by comparing the runs with the jobs that
`Engine.look` returns. An engine only implements the operations. Each operation must be idempotent,
because a worker process of the control plane can be killed between two operations.
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
    """The engine does not answer now, so the state of its jobs is unknown."""


class EngineRefusedError(PacelineError):
    """The engine permanently refuses a job."""


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run that all engines have."""

    server: Annotated[
        Word,
        msgspec.Meta(
            description="URL by which the nodes reach this server; default: the URL to which the "
            "run's launch was sent"
        ),
    ] = ""


@dataclass(frozen=True)
class Availability:
    """Availability and version of an engine.

    `problem` is the reason why the engine cannot be used; None if it can be used.
    """

    reachable: bool
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Order:
    """Job to submit.

    On each node, the job runs ``paceline node --run RUN --slot SLOT --host HOST``. HOST is the
    engine's name of the machine, with which `Engine.cordon` is called; an engine that cannot cordon
    machines may leave the option out.

    Args:
        label: at most 63 letters, digits and dots. The engine stores it with the job.
        run: public id of the run.
        nodes: number of nodes, which the engine must start all at once or not at all.
        nproc: ranks per node.
        cwd: a directory that exists on the nodes.
        options: options of the run, an instance of `Engine.options`.
        server: value of PACELINE_SERVER for the nodes.
        token: value of PACELINE_TOKEN for the nodes. Other users must not see it.
        avoid: machines that the engine must not use, by the engine's names.
    """

    label: str
    run: str
    nodes: int
    nproc: int
    cwd: str
    options: msgspec.Struct
    server: str
    token: str = field(repr=False)
    avoid: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """Job of Paceline, as the engine lists it.

    Args:
        label: label of its `Order`.
        ref: the engine's own id of the job.
        state: state of the job. A job counts as running once all of its nodes run.
        reason: why the job is queued or how it ended, as the engine describes it.
        cancelled: a user has cancelled the job, so its run counts as stopped, not as failed.
    """

    label: str
    ref: str
    state: Literal["queued", "running", "ended"]
    reason: str = ""
    cancelled: bool = False


class Engine(ABC):
    """`Backend` whose runs are jobs of an engine. Its objects keep no state.

    Attributes:
        title: name of the engine in messages.
        keeps_ended: true if the engine lists ended jobs for hours. If it does, a job that is
            missing from the list counts as removed by a user.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    plans_itself: ClassVar[bool] = False
    options: ClassVar[type[msgspec.Struct]]
    keeps_ended: ClassVar[bool] = False

    @abstractmethod
    def availability(self) -> Availability:
        """Check whether the engine answers. Must not raise, and must return within seconds."""

    @abstractmethod
    def submit(self, order: Order) -> str:
        """Submit a job, and return its `Job.ref`. Called if `look` lists no job with this label.

        Raises:
            EngineAwayError: it is unknown whether the engine accepted the job. A later `look` shows
                whether it did.
            EngineRefusedError: the engine refuses the job.
        """

    @abstractmethod
    def look(self, prefix: str) -> Sequence[Job]:
        """Return the jobs whose label starts with `prefix`, also ended jobs that are still listed.

        Raises:
            EngineAwayError: the engine does not answer.
        """

    @abstractmethod
    def stop(self, refs: Sequence[str]) -> None:
        """End jobs, with SIGTERM first. Jobs that have ended already are not an error.

        Raises:
            EngineAwayError: the engine does not answer. The caller retries.
        """

    def cordon(self, host: str, reason: str | None) -> None:
        """Prevent new jobs on a machine, while jobs on it continue. Idempotent.

        Args:
            host: name of the machine, as its node passed it with ``--host``.
            reason: author and reason of the cordon, for the engine's users. None lifts the cordon,
                but a cordon that was set with the engine's own tools stays.

        Raises:
            EngineAwayError: the engine does not answer. The caller retries.
            EngineRefusedError: the engine refuses or cannot cordon machines.
        """
        raise EngineRefusedError(f"{self.title} cannot cordon nodes")

    def cordon_as(self, plane: str, host: str, reason: str | None) -> None:
        """Cordon a machine as `cordon` does, if several control planes use the same engine.

        `plane` is the id of the control plane. An engine that can store which control plane set a
        cordon overrides this method, so that no control plane lifts another's cordon.
        """
        self.cordon(host, reason)

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuse runs that no job can execute, and options that the engine does not have."""
        options_of(self.options, new.backend_options)
        check_nodes(new)
        if not launch:
            raise NewRunError("launch", f"{self.title} starts the run: omit it")
        if new.node is not None:
            raise NewRunError("node", f"{self.title} chooses the nodes: omit it")
        if new.env:
            raise NewRunError(
                "env",
                "values are not stored, and the job starts later: set variables in the script",
            )
        check_path(new)

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the run's nodes that answer."""
        return answering(new, nodes)

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Launch the run on the nodes that have joined it."""
        launch_on(bus, run, new, credentials, new.where)


def directory(new: NewRun) -> str:
    """Return the working directory of a run's jobs, which must exist on the nodes."""
    return new.cwd or str(PurePath(new.script).parent)
