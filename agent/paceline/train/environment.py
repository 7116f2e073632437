"""Environment variables that the launcher sets for a rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline import observation
from paceline.core import reform
from paceline.core.terms import PLAIN
from paceline.node import rundir
from paceline.planning.policy_in_force import FIRST_POLICY, PolicyInForce

logger = logging.getLogger(__name__)

SPOOL_BYTES = 64 << 20

# The keys are the runs that a session of this process reports, as (run, attempt). The value is True
# once a warning about a further session was logged.
_taken: dict[tuple[str, int], bool] = {}


@dataclass(frozen=True)
class Environment:
    """Values of Paceline's environment variables; docs/internals.md describes the variables.

    If `run` is None, the ranks have no control plane.
    """

    run: str | None = None
    bus: str | None = None
    # The run's key: the leader ignores messages without a MAC made with this key. None: no
    # server has issued a key for the run, and no MAC is required.
    key: bytes | None = None
    spool: Path | None = None
    spool_bytes: int = SPOOL_BYTES
    emulate: str | None = None
    # Number of times that all ranks were started before this start.
    attempt: int = 0
    # Number of the first attempt of the run's newest launch.
    first_attempt: int = 0
    # Maximum number of restarts of all ranks after failures.
    max_restarts: int = 0
    # Each rank's node; empty: unknown.
    placement: tuple[str, ...] = ()
    # File whose existence announces that nodes join or leave; see `core.reform`.
    reform: Path | None = None
    # File with the memory limits that earlier attempts learned for this rank's device.
    memory: Path | None = None
    # The policy with which rank 0 plans without a control plane; None: the script's.
    policy: PolicyInForce | None = None
    # The policy with which the control plane started the run; None: no control plane, or a later
    # attempt, before which the policy may have been switched. This process may lack the policy.
    first_policy: PolicyInForce | None = None
    # True if PACELINE_SERVER, the address of a server, is set. Paceline's launchers do not pass
    # that variable to ranks.
    server: bool = False
    # Data directory, in which rank 0 keeps reports of the epochs it plans. None: it reports none,
    # because the ranks have a control plane, or because this user has no home directory.
    data: Path | None = None

    @staticmethod
    def read(variables: Mapping[str, str]) -> Environment:
        """Read a process's environment; an empty value counts as absent.

        If the run is observed (`paceline observe`), a session gets no control plane and no policy,
        because the observer in each rank reports how the unchanged script trains.

        Raises:
            ValueError: a variable is malformed; the message names the variable.
        """
        environment = Environment.of_observed(variables)
        if observation.observed(variables):
            return replace(environment.apart(), policy=PolicyInForce(PLAIN))
        return environment

    @staticmethod
    def of_observed(variables: Mapping[str, str]) -> Environment:
        """Read the environment for a rank's observer (`paceline observe`); see `read`."""
        spool, reforms = variables.get("PACELINE_SPOOL"), variables.get(reform.VARIABLE)
        first_attempt = _whole(variables, "PACELINE_FIRST_ATTEMPT", 0)
        restarts = _whole(variables, "TORCHELASTIC_RESTART_COUNT", 0)
        memory, place = variables.get("PACELINE_MEMORY"), _whole(variables, "LOCAL_RANK", 0)
        attempt = _whole(variables, "PACELINE_ATTEMPT", first_attempt + restarts)
        return Environment(
            run=variables.get("PACELINE_RUN") or None,
            bus=variables.get("PACELINE_BUS") or None,
            key=_key(variables),
            spool=Path(spool) if spool else None,
            spool_bytes=_whole(variables, "PACELINE_SPOOL_BYTES", SPOOL_BYTES),
            emulate=variables.get("PACELINE_EMULATE") or None,
            attempt=attempt,
            first_attempt=first_attempt,
            max_restarts=_whole(variables, "TORCHELASTIC_MAX_RESTARTS", 0),
            placement=_names(variables, "PACELINE_PLACEMENT"),
            reform=Path(reforms) if reforms else None,
            memory=Path(memory) / f"{place}.json" if memory else None,
            policy=_policy(variables),
            first_policy=None if attempt else _first_policy(variables),
            server=bool(variables.get("PACELINE_SERVER")),
            data=_data(variables),
        )

    def warn_unknown(self) -> None:
        """Warn if the user set PACELINE_SERVER, but this training is not a run of a server."""
        if self.run is None and self.server:
            logger.warning(
                "PACELINE_SERVER is set, but this training is not a run of the server, which does "
                "not see it: start the script with `paceline node` or "
                "`paceline run` instead of torchrun"
            )

    def placed(self, world: int) -> list[str]:
        """Return each rank's node; empty unless the launcher gave a node for each rank."""
        return list(self.placement) if len(self.placement) == world else []

    def claim(self) -> Environment:
        """Return the environment of a session that begins to train.

        The first session of a process gets this environment. Each later session gets an environment
        without a control plane, because two sessions would report steps with the same numbers.
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
                "this script's first Session reports run %s: any other Session plans locally and "
                "reports nothing",
                self.run,
            )
        return self.apart()

    def apart(self) -> Environment:
        """Return the environment without a control plane."""
        return replace(self, run=None, bus=None, key=None, spool=None, reform=None, memory=None)


def _key(variables: Mapping[str, str]) -> bytes | None:
    text = variables.get("PACELINE_KEY") or ""
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        raise ValueError("PACELINE_KEY must be hexadecimal") from None


def _data(variables: Mapping[str, str]) -> Path | None:
    if variables.get("PACELINE_RUN"):
        return None
    given = variables.get("PACELINE_DATA")
    try:
        return Path(given).expanduser().absolute() if given else rundir.default_data()
    # This user has no home directory.
    except RuntimeError:
        return None


def _policy(variables: Mapping[str, str]) -> PolicyInForce | None:
    text = variables.get("PACELINE_POLICY")
    if not text:
        return None
    given: object = text
    if text.lstrip().startswith("{"):
        try:
            given = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"PACELINE_POLICY must be a policy's name or JSON: {error}") from None
    return PolicyInForce.of(given, "PACELINE_POLICY")


def _first_policy(variables: Mapping[str, str]) -> PolicyInForce | None:
    text = variables.get(FIRST_POLICY)
    if not text:
        return None
    try:
        [(name, parameters)] = msgspec.json.decode(text, type=dict[str, dict[str, Any]]).items()
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{FIRST_POLICY} must be JSON {{name: parameters}}: {error}") from None
    return PolicyInForce(name, parameters)


def _names(variables: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = variables.get(name) or "[]"
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} must be a JSON list of names: {error}") from None


def _whole(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}: it must be a whole number ≥ 0")
    return int(text)
