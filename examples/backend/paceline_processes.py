"""A small engine: jobs stand in a folder, and `paceline_processes_daemon` starts them.

Its machines are names, of which each takes some nodes at once. In the folder, which only its user
can read, are for each job N:

* `N.job`: what was submitted. Its number is the job's name.
* `N.state`: what the daemon says of it, in JSON: state, reason, process ids.
* `N.stop`: the job is to end.

`HOST.cordon` holds why a machine gets no further job.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from paceline_backend.backends import (
    Availability,
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Job,
    Order,
)

FOLDER = "PACELINE_PROCESSES"  # the variable that names the folder
_OURS = "paceline: "  # begins the reason of a cordon of ours; those of others are left alone


class ProcessesOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run that the daemon understands."""

    env: dict[str, str] = msgspec.field(default_factory=dict)  # for the nodes


class Processes(Engine):
    """Each job is a few processes. An `Engine`."""

    name: ClassVar[str] = "processes"
    title: ClassVar[str] = "Processes"
    options: ClassVar[type[msgspec.Struct]] = ProcessesOptions

    def availability(self) -> Availability:
        try:
            machines(_folder())
        except EngineAwayError as error:
            return Availability(False, problem=str(error))
        return Availability(True, "0.1.0")

    def submit(self, order: Order) -> str:
        folder = _folder()
        usable = set(machines(folder)) - set(order.avoid)
        if not usable:
            raise EngineRefusedError("no machine is left but those to avoid")
        assert isinstance(order.options, ProcessesOptions)
        return _number(folder, asdict(order) | {"options": {"env": order.options.env}})

    def look(self, prefix: str) -> Sequence[Job]:
        return [job for job in jobs(_folder()) if job.label.startswith(prefix)]

    def stop(self, refs: Sequence[str]) -> None:
        folder = _folder()
        for ref in refs:
            (folder / f"{ref}.stop").touch()

    def cordon(self, host: str, reason: str | None) -> None:
        folder = _folder()
        if host not in machines(folder):
            raise EngineRefusedError(f"there is no machine {host}")
        path = folder / f"{host}.cordon"
        known = path.read_text() if path.exists() else None
        if known is not None and not known.startswith(_OURS):
            return  # somebody else's
        if reason is None:
            path.unlink(missing_ok=True)
        else:
            write(path, _OURS + reason)


def _folder() -> Path:
    """The folder of a daemon that answers: it holds a lock as long as it lives."""
    folder = Path(os.environ.get(FOLDER, Path.home() / ".paceline-processes"))
    try:
        with (folder / "daemon.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return folder
    except OSError as error:
        raise EngineAwayError(f"{folder}: {error.strerror}") from error
    raise EngineAwayError(f"no daemon works in {folder}")


def machines(folder: Path) -> dict[str, int]:
    """The daemon's machines, and how many nodes each takes."""
    return dict(json.loads((folder / "machines.json").read_text()))


def jobs(folder: Path) -> list[Job]:
    """All jobs that were ever submitted, the first one first."""
    known = []
    for path in sorted(folder.glob("*.job"), key=lambda path: int(path.stem)):
        said = state(folder, path.stem)
        label = json.loads(path.read_text())["label"]
        cancelled = said["reason"] == "CANCELLED"
        known.append(Job(label, path.stem, said["state"], said["reason"], cancelled))
    return known


def state(folder: Path, ref: str) -> Mapping[str, Any]:
    """Return the state of a job, as the daemon wrote it."""
    with suppress(FileNotFoundError):
        return dict(json.loads((folder / f"{ref}.state").read_text()))
    return {"state": "queued", "reason": "the daemon has not seen it yet", "processes": {}}


def _number(folder: Path, job: Mapping[str, Any]) -> str:
    """Writes a job under the next free number; a reader sees all of it or nothing."""
    draft = folder / f"draft-{os.getpid()}-{id(job)}"
    write(draft, json.dumps(job))
    known = [int(path.stem) for path in folder.glob("*.job") if re.fullmatch(r"\d+", path.stem)]
    number = max(known, default=0) + 1
    while True:
        try:
            os.link(draft, folder / f"{number}.job")  # fails if somebody else took the number
        except FileExistsError:
            number += 1
        else:
            draft.unlink()
            return str(number)


def write(path: Path, text: str) -> None:
    """Replaces a file that only its user can read."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.touch(0o600)
    draft.write_text(text)
    draft.replace(path)
