"""Resume of a run on another training backend, or with other numbers of nodes and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline_backend import backends
from paceline_backend.requests.errors import (
    ConflictError,
    InvalidRequestError,
    backend_of,
    check_start,
)
from paceline_backend.store import Connection, runs, switches
from paceline_backend.store.new_runs import NewRun


@dataclass(frozen=True)
class Elsewhere:
    """Changes to a run that is resumed. None keeps the present value.

    Args:
        backend: name of the training backend.
        backend_options: options of the backend. None on another backend means its defaults.
        nodes_min: minimum number of nodes.
        nodes_max: maximum number of nodes.
        nproc: ranks per node.
        server: URL at which the caller reaches the control plane.
    """

    backend: str | None = None
    backend_options: Mapping[str, Any] | None = None
    nodes_min: int | None = None
    nodes_max: int | None = None
    nproc: int | None = None
    server: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """Requested changes, for the audit log."""
        names = ("backend", "backend_options", "nodes_min", "nodes_max", "nproc")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


AS_BEFORE = Elsewhere()


def moved(connection: Connection, run: str, new: NewRun, to: Elsewhere, *, start: bool) -> NewRun:
    """Return the run `new` with the changes `to`.

    `start` is True if the control plane starts the run, and False if the caller does.

    Raises:
        InvalidRequestError: the backend does not accept the changed run.
        ConflictError: the run is on an engine, which only the control plane can start, or it is
            adopted, which only its user can start.
    """
    if new.backend == backends.AdoptedBackend.name and to.backend is None:
        raise ConflictError(
            f"run {run}: its user started its nodes, and must restart them under another key; or "
            "name a backend on which the run should continue"
        )
    if not to.asked:
        if new.has_jobs and not start:
            raise ConflictError(f"run {run}: {new.backend} starts it: omit `launch`")
        return replace(new, node=None, nodes=()) if new.has_jobs else new
    backend = backend_of(to.backend or new.backend)
    if backend.plans_itself:
        raise InvalidRequestError(
            "backend", f"{backend.name} cannot continue a run: it has no processes"
        )
    made = _changed(new, to, backend)
    try:
        backend.check(replace(made, node=None), launch=start)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    now = switches.latest(connection, runs.key_of(connection, run))
    check_start(now.policy, now.parameters, made.most_ranks)
    return made


def _changed(new: NewRun, to: Elsewhere, backend: backends.Backend) -> NewRun:
    nodes_max = to.nodes_max or max(new.nodes_max, to.nodes_min or 1)
    made = replace(
        new,
        nproc=to.nproc or new.nproc,
        nodes_min=to.nodes_min or min(new.nodes_min, nodes_max),
        nodes_max=nodes_max,
    )
    engine, goes = isinstance(backend, backends.Engine), backend.name != new.backend
    if goes or engine or (made.nodes_max > 1) != (new.nodes_max > 1):
        made = replace(made, node=None, nodes=())
    if goes or to.backend_options is not None:
        server = {"server": to.server} if engine else {}
        made = replace(made, backend_options={**server, **(to.backend_options or {})})
    if backend.name != "local" or made.nodes_max == 1:
        # Only multi-node runs on backend `local` can have spares.
        made = replace(made, spares=0, replace_slow_nodes=False)
    return replace(made, backend=backend.name, has_jobs=engine)
