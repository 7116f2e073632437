"""Environment variables that a driver passes to the ranks that it starts; see `core.driver`.

A driver is a script that starts the ranks itself, as with Ray Train. It calls `of_driver`, and
passes the result and the `whereabouts` of each rank to `variables_of`. Each rank then calls
`set_variables` with its variables.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline import observation
from paceline.core import driver
from paceline.core.errors import PacelineError
from paceline.node.machine import default_name
from paceline.planning.policy_in_force import FIRST_POLICY
from paceline.train.startup import place
from paceline.wire.bus import is_loopback

logger = logging.getLogger(__name__)

_ATTEMPT = "PACELINE_ATTEMPT"
_EMULATE = "PACELINE_EMULATE"
_POLICY = "PACELINE_POLICY"
_EVERYWHERE = (
    *("PACELINE_RUN", "PACELINE_BUS", "PACELINE_KEY", "PACELINE_SPOOL_BYTES"),
    *("PACELINE_FIRST_ATTEMPT", _ATTEMPT, _EMULATE, FIRST_POLICY),
)
_PLACEMENT = "PACELINE_PLACEMENT"
_DIRECTORIES = ("PACELINE_SPOOL", "PACELINE_MEMORY", "PACELINE_CHECKPOINTS")
# Variables for ranks on the driver's machine only, because the directories and the CA file exist
# only there, and the agent that reads the spool runs there.
_BESIDE = (*_DIRECTORIES, "PACELINE_CA_FILE")
_OF_RUN = (*_EVERYWHERE, _PLACEMENT, *_DIRECTORIES)

# Runs whose variables this process has passed to ranks.
_taken: set[str] = set()


@dataclass(frozen=True)
class Whereabouts:
    """Location of a rank: its node's name, and whether the driver runs on the same machine."""

    node: str
    beside_driver: bool


def whereabouts(driver_place: str) -> Whereabouts:
    """Return this rank's location; the driver got `driver_place` from its `startup.place()`."""
    return Whereabouts(default_name(), place() == driver_place)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set this rank's variables, after unsetting those that it inherited from another run."""
    for name in _OF_RUN:
        os.environ.pop(name, None)
    os.environ.update(variables)


def of_driver(environ: Mapping[str, str], adapter: str) -> dict[str, str] | None:
    """Return the run's variables from this driver process, to the first caller only.

    Later callers, and scripts outside of a run, get at most PACELINE_EMULATE and PACELINE_POLICY,
    so that their ranks belong to no run. Return None if the run is observed (`paceline observe`),
    because its ranks keep their own variables. `adapter` names the caller in messages.

    Raises:
        PacelineError: the process is one of several ranks.
    """
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE") or 1) > 1:
        raise PacelineError(
            f"{adapter}: a launcher started several ranks of this script, and each of them would "
            "start all workers: start the script with `paceline run --driver`, or with python"
        )
    if observation.observed(environ):
        return None
    run = environ.get("PACELINE_RUN")
    if not run:
        return _picked(environ, _EMULATE, _POLICY)
    if environ.get(driver.VARIABLE) != str(os.getpid()):
        logger.warning(
            "%s: run %s will not show these workers: only the process that `paceline run --driver` "
            "started can start ranks of the run",
            adapter,
            run,
        )
        return _picked(environ, _EMULATE, _POLICY)
    if run in _taken:
        logger.warning(
            "this script's first %s uses run %s: the workers of any further %s train without a "
            "control plane",
            adapter,
            run,
            adapter,
        )
        return _picked(environ, _EMULATE, _POLICY)
    _taken.add(run)
    return _picked(environ, *_EVERYWHERE, *_BESIDE, _PLACEMENT, _POLICY, driver.RESTARTS)


def variables_of(
    given: Mapping[str, str], ranks: Sequence[Whereabouts], starts: int
) -> list[dict[str, str]]:
    """Return the variables of each rank, [W].

    `given` is the result of `of_driver`. `starts` is the number of earlier starts of the ranks;
    each start is an attempt.
    """
    alone = [_picked(given, _EMULATE, _POLICY)] * len(ranks)
    if "PACELINE_RUN" not in given:
        return alone
    if starts > int(given[driver.RESTARTS]):
        logger.warning(
            "the workers were restarted more often than --max-restarts allows, so run %s no longer "
            "shows them: give `paceline run --max-restarts` the number of restarts that the driver "
            "allows",
            given["PACELINE_RUN"],
        )
        return alone
    [own] = json.loads(given[_PLACEMENT])
    nodes = [own if rank.beside_driver else rank.node for rank in ranks]
    bus = urlsplit(given["PACELINE_BUS"]).hostname or ""
    far = sorted({rank.node for rank in ranks if not rank.beside_driver})
    if far and is_loopback(bus):
        logger.warning(
            "workers on %s cannot reach the control plane, whose address here is %s: let the "
            "server listen on an address that all nodes reach, and give `paceline run --server` "
            "that address",
            ", ".join(far),
            bus,
        )
    attempt = str(int(given[_ATTEMPT]) + starts)
    variables = _picked(given, *_EVERYWHERE, _POLICY) | {
        _ATTEMPT: attempt,
        _PLACEMENT: json.dumps(nodes),
    }
    beside = variables | _picked(given, *_BESIDE)
    return [beside if rank.beside_driver else variables for rank in ranks]


def _picked(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: variables[name] for name in names if name in variables}
