"""Ray Train: a `torch_config` with which the workers of a TorchTrainer are the ranks of a run.

A script changes one argument, and its training loop makes a `paceline.Session`, as any other loop::

    from paceline.ray import PacelineConfig

    trainer = TorchTrainer(
        train, torch_config=PacelineConfig(), scaling_config=ScalingConfig(num_workers=2)
    )
    trainer.fit()

``paceline run --driver --nproc 2 script.py`` starts it as a run of the control plane. Started in
another way, the workers train without one. Needs ``paceline[ray]``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import TorchConfigContextManager, _TorchBackend

from paceline import observation
from paceline.core import driver
from paceline.core.errors import PacelineError
from paceline.node.machine import default_name
from paceline.train.meeting import place
from paceline.train.session import close_all
from paceline.wire.bus import is_loopback

logger = logging.getLogger(__name__)

_ATTEMPT = "PACELINE_ATTEMPT"
_EMULATE = "PACELINE_EMULATE"
# What the driver hands on to its workers, wherever they are.
_EVERYWHERE = (
    *("PACELINE_RUN", "PACELINE_BUS", "PACELINE_KEY", "PACELINE_SPOOL_BYTES"),
    *("PACELINE_FIRST_ATTEMPT", _ATTEMPT, _EMULATE),
)
_PLACEMENT = "PACELINE_PLACEMENT"
_SPOOL = "PACELINE_SPOOL"  # to workers on the driver's machine: only there somebody reads it
_OF_RUN = (*_EVERYWHERE, _PLACEMENT, _SPOOL)

_taken: list[str] = []  # the run, once a config of this process reports it


@dataclass
class PacelineConfig(TorchConfig):  # type: ignore[misc]
    """`TorchConfig` of Ray Train, whose workers take part in the driver's run. Make one a trainer.

    Each time that Ray starts the workers is an attempt of the run. Sessions are closed when the
    training loop returns or raises. Without a run, the workers train without a control plane.

    Args:
        backend: of `TorchConfig`, as all that follow.
        init_method: "env" or "tcp".
        timeout_s: of the process group.

    Raises:
        PacelineError: several ranks of a launcher each make one, so each would start all workers.
    """

    variables: dict[str, str] | None = field(
        default_factory=lambda: _of_driver(os.environ), init=False, repr=False, compare=False
    )
    machine: str = field(default_factory=place, init=False, repr=False, compare=False)

    @property
    def backend_cls(self) -> type[_Backend]:
        """What prepares the workers."""
        return _Backend

    @property
    def train_func_context(self) -> type[_Closing]:
        """What surrounds the training loop on each worker."""
        return _Closing


class _Closing(TorchConfigContextManager):  # type: ignore[misc]
    """Closes sessions at the loop's end: Ray kills workers, so Python does not call `atexit`."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        close_all()
        return super().__exit__(kind, error, traceback)


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Tells the workers of their run before they make their process group."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = 0  # of the workers, in this process of Ray Train's controller

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """As Ray Train's."""
        if backend_config.variables is not None:
            found = worker_group.execute(_found, backend_config.machine)
            told = _told(backend_config.variables, found, self.starts)
            tasks = (
                worker_group.execute_single_async(rank, _tell, variables)
                for rank, variables in enumerate(told)
            )
            ray.get(list(tasks))
            self.starts += 1
        super().on_start(worker_group, backend_config)


@dataclass(frozen=True)
class _Found:
    """Where a worker is: the node as an agent there would call it."""

    node: str
    beside_driver: bool  # on the driver's machine


def _found(driver_place: str) -> _Found:
    return _Found(default_name(), place() == driver_place)


def _tell(variables: Mapping[str, str]) -> None:
    """Sets a worker's variables. Its node may have been started within another run."""
    for name in _OF_RUN:
        os.environ.pop(name, None)
    os.environ.update(variables)


def _of_driver(environ: Mapping[str, str]) -> dict[str, str] | None:
    """What this driver knows of its run; empty: there is none. None: its workers are observed.

    Raises:
        PacelineError: as `PacelineConfig`.
    """
    if int(environ.get("WORLD_SIZE") or 1) > 1 and "TORCHELASTIC_RUN_ID" in environ:
        raise PacelineError(
            "PacelineConfig: a launcher has started several ranks of this script, and each would "
            "start all workers: start it with `paceline run --driver`, or with python"
        )
    if observation.observed(environ):
        return None
    run = environ.get("PACELINE_RUN")
    emulated = _picked(environ, _EMULATE)
    if not run:
        return emulated
    if environ.get(driver.VARIABLE) != str(os.getpid()):
        logger.warning(
            "run %s does not show these workers: only the process that `paceline run --driver` has "
            "started can have the run's",
            run,
        )
        return emulated
    if _taken:
        logger.warning(
            "this script's first PacelineConfig reports run %s: workers of any other train without "
            "a control plane",
            run,
        )
        return emulated
    _taken.append(run)
    return _picked(environ, *_OF_RUN, driver.RESTARTS)


def _told(given: Mapping[str, str], found: list[_Found], starts: int) -> list[dict[str, str]]:
    """Each rank's variables.

    Args:
        given: what the driver knows.
        found: of each rank.
        starts: how often Ray has started workers of this training before.
    """
    if "PACELINE_RUN" not in given:
        return [_picked(given, _EMULATE)] * len(found)
    if starts > int(given[driver.RESTARTS]):
        logger.warning(
            "Ray has started the workers anew more often than the run was started for, so the "
            "control plane does not know of them: give `paceline run` as many --max-restarts as "
            "FailureConfig(max_failures=…)"
        )
        return [_picked(given, _EMULATE)] * len(found)
    [own] = json.loads(given[_PLACEMENT])
    nodes = [own if each.beside_driver else each.node for each in found]
    bus = urlsplit(given["PACELINE_BUS"]).hostname or ""
    far = sorted({each.node for each in found if not each.beside_driver})
    if far and is_loopback(bus):
        logger.warning(
            "workers on %s do not reach the control plane, whose address is %s here: give the "
            "server an address that all nodes reach, and `paceline run --server` that one",
            ", ".join(far),
            bus,
        )
    attempt = str(int(given[_ATTEMPT]) + starts)
    told = _picked(given, *_EVERYWHERE) | {_ATTEMPT: attempt, _PLACEMENT: json.dumps(nodes)}
    beside = told | _picked(given, _SPOOL)
    return [beside if each.beside_driver else told for each in found]


def _picked(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: variables[name] for name in names if name in variables}
