"""`paceline resume`: continues a failed or stopped run, on its node or in the foreground."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline import observation
from paceline.core import driver
from paceline.core.errors import InputError
from paceline.node import rundir
from paceline.node.client import Client
from paceline.node.delivery import is_supervised
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.node.session import check_bus, of_run
from paceline.node.starting.foreground import SUPERVISOR, say, supervise
from paceline.node.starting.progress import ProgressPoller
from paceline.node.supervisor import Supervisor, check
from paceline.wire import OBSERVED, Launch

_EMULATE = "PACELINE_EMULATE"


def variables(given: Sequence[str]) -> dict[str, str]:
    """Parse variables from ``NAME=VALUE``, or from ``NAME`` with this process's value.

    Raise an InputError if the variable is not set here, or if the text has no name.
    """
    env = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not name or (not separator and name not in os.environ):
            raise InputError(f"--env {text}: give NAME=VALUE, or NAME of a variable that is set")
        env[name] = value if separator else os.environ[name]
    return env


def started_here(data: Path, run: str) -> bool:
    """Return True if `paceline run` started a run with this data directory."""
    record = rundir.read(rundir.directory_of(data, run) / "run.json", Record)
    return record is not None and record.supervisor == SUPERVISOR


def on_node(
    client: Client, run: str, env: Mapping[str, str], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Request that the control plane restarts a run on its node; return the run as REST shows it.

    `env` has further environment variables of the ranks, `asked` further fields of REST's `resume`.
    """
    return dict(client.change("POST", run, "resume", {**asked, "env": dict(env)}))


def in_foreground(
    client: Client, run: str, data: Path, env: Mapping[str, str], asked: Mapping[str, Any]
) -> int:
    """Continue a run of `paceline run` on this machine; return the exit code.

    Script, arguments, directory and number of ranks are as before. The ranks get this process's
    environment. Raise an InputError if the script is gone, if a process still supervises the
    run, or if the server rejects the request.
    """
    known = client.call("GET", f"/runs/{run}")
    if is_supervised(rundir.directory_of(data, run)):
        raise InputError(
            f"run {run}: a process on this machine still supervises it; end that process first"
        )
    launch = Launch(
        known["script"], known["args"], known["nproc"], _as_before(known, env), known["cwd"]
    )
    check(launch)
    check_bus(client, client.version())
    now = client.change("POST", run, "resume", {**asked, "launch": False})
    attempt = now["first_attempt"]
    with Link(of_run(client, run)) as link:
        launch = msgspec.structs.replace(launch, max_restarts=now["max_restarts"], attempt=attempt)
        say(f"run {run} continues with attempt {attempt}: {client.server}/runs/{run}")
        record = Record(run, known["node"], SUPERVISOR, link.session.control)
        return supervise(
            launch, Supervisor(launch, data, record, link), link, ProgressPoller(client, run)
        )


def _as_before(known: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Add to the given variables those that mark an observed run, a driver or emulated speeds."""
    before = {}
    if known["policy"] == OBSERVED:
        before[observation.VARIABLE] = "1"
    if known["driver"]:
        before[driver.VARIABLE] = "1"
    if known["emulated"] is not None and _EMULATE not in os.environ:
        before[_EMULATE] = json.dumps(known["emulated"])
    return {**before, **env}
