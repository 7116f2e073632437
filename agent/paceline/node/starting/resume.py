"""`paceline resume`: continues a failed or stopped run, through the server or in the foreground."""

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
    """Parse the environment variables of ``--env``: texts ``NAME=VALUE`` or ``NAME``.

    ``NAME`` stands for the variable's value in this process. Raise an InputError if this process
    has no such variable, or if a text has no name.
    """
    env = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not name or (not separator and name not in os.environ):
            raise InputError(f"--env {text}: give NAME=VALUE, or NAME of a variable that is set")
        env[name] = value if separator else os.environ[name]
    return env


def started_here(data: Path, run: str) -> bool:
    """Return True if `paceline run` started the run on this machine, with this data directory."""
    record = rundir.read(rundir.directory_of(data, run) / "run.json", Record)
    return record is not None and record.supervisor == SUPERVISOR


def on_node(
    client: Client, run: str, env: Mapping[str, str], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Request that the control plane resumes a run; return the run as the server shows it.

    `env` has further environment variables of the ranks. `asked` has further fields of
    ``POST /runs/{id}/resume``.
    """
    return dict(client.change("POST", run, "resume", {**asked, "env": dict(env)}))


def in_foreground(
    client: Client, run: str, data: Path, env: Mapping[str, str], asked: Mapping[str, Any]
) -> int:
    """Continue a run of `paceline run` on this machine; return the exit code.

    Script, arguments, working directory and number of ranks are as before. The ranks get this
    process's environment and the variables `env`. Raise an InputError if the script is gone, if a
    process still supervises the run, or if the server rejects the request.
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
    before = {}
    if known["policy"] == OBSERVED:
        before[observation.VARIABLE] = "1"
    if known["driver"]:
        before[driver.VARIABLE] = "1"
    if known["emulated"] is not None and _EMULATE not in os.environ:
        before[_EMULATE] = json.dumps(known["emulated"])
    return {**before, **env}
