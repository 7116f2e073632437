"""What the launcher tells a rank through environment variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger(__name__)

SPOOL_BYTES = 64 << 20

# (run, attempt) that a session of this process reports → whether a later session was warned
_taken: dict[tuple[str, int], bool] = {}


@dataclass(frozen=True)
class Environment:
    """The variables of docs/internals.md. Without `run` there is no control plane."""

    run: str | None = None
    bus: str | None = None
    spool: Path | None = None
    spool_bytes: int = SPOOL_BYTES
    emulate: str | None = None
    attempt: int = 0
    max_restarts: int = 0  # of all ranks, after one failed

    @staticmethod
    def read(variables: Mapping[str, str]) -> Environment:
        """Reads a process's environment; an empty value counts as absent.

        Raises:
            ValueError: a variable must be a number and is none; the message names the variable.
        """
        spool = variables.get("PACELINE_SPOOL")
        return Environment(
            run=variables.get("PACELINE_RUN") or None,
            bus=variables.get("PACELINE_BUS") or None,
            spool=Path(spool) if spool else None,
            spool_bytes=_whole(variables, "PACELINE_SPOOL_BYTES", SPOOL_BYTES),
            emulate=variables.get("PACELINE_EMULATE") or None,
            attempt=_whole(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_whole(variables, "TORCHELASTIC_MAX_RESTARTS", 0),
        )

    def claim(self) -> Environment:
        """The environment of a session that begins to train.

        The first session of a process gets this environment. Two sessions would report the same
        steps of the same run, so each later session gets an environment without a control plane.
        """
        if self.run is None:
            return self
        key = self.run, self.attempt
        if key not in _taken:
            _taken[key] = False
            return self
        if not _taken[key]:
            _taken[key] = True
            logger.warning(
                "this script's first Session reports run %s: any other Session plans by itself and "
                "reports nothing",
                self.run,
            )
        return replace(self, run=None, bus=None, spool=None)


def _whole(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}: it must be a whole number ≥ 0")
    return int(text)
