"""What a leader plans with: a run's context, and rank 0's result of the rendezvous."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.terms import Terms
from paceline.train.context import RunContext
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.epochs import EpochSteps
from paceline.train.profile import Limits
from paceline.train.startup import Startup


def run_context(terms: Terms, environment: Environment | None = None, **other: Any) -> RunContext:
    """A run's context on rank 0; without limits unless `other` has some."""
    device = Device(None, 0, 1)
    fields = {"limits": Limits([]), "epoch_steps": EpochSteps(terms), **other}
    return RunContext(terms, environment or Environment(), device, **fields)


def met(world: int, sizes: npt.NDArray[np.float64], store: Any) -> Startup:
    """What rank 0 has after the start-up of this number of ranks."""
    return Startup(0, world, store, 0, sizes)
