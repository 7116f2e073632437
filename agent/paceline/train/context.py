"""Facts about a run that a rank knows before the first step, passed as one argument.

`Session` makes a `RunContext` once the ranks have met. `session.profile`, and memory that ran out
in an earlier attempt, replace its limits; both are before the first step, and nothing changes it
afterwards. What the ranks share while they train, such as their store, is in `Meeting` instead,
because it must be released when the session is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.terms import Terms
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.nodedata.node import NodeData
from paceline.train.plan.epochs import EpochSteps
from paceline.train.profile import Limits
from paceline.train.streams.reader import Reader


@dataclass(frozen=True)
class RunContext:
    """Everything about a run that does not change on a rank while it trains.

    Args:
        terms: that all ranks agreed on.
        environment: what the launcher told this rank; without a run there is no control plane.
        device: what this rank computes on.
        limits: of the ranks' memory.
        epoch_steps: the number of steps of each epoch.
        uneven_steps: whether ranks may have different numbers of turns of the script's loop.
        data: of this node, where samples are on the nodes that have them.
        reader: of this rank, if the data is a stream.
        prove: whether the loss is proven before the first step.
    """

    terms: Terms
    environment: Environment
    device: Device
    limits: Limits
    epoch_steps: EpochSteps
    uneven_steps: bool = False
    data: NodeData | None = None
    reader: Reader | None = None
    prove: bool = True
