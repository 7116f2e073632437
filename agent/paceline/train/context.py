"""One object with what a rank knows about its run before the first step.

`session.profile` replaces the limits of a `RunContext`, and so does the loop if memory ran out in
an earlier attempt. From the first step on, the context does not change. Objects that the ranks
share while they train, such as their store, are in `Startup` instead, because they must be released
when the session is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.terms import Terms
from paceline.planning.policy_in_force import PolicyInForce
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.epochs import EpochSteps
from paceline.train.nodedata import NodeData
from paceline.train.profile import Limits
from paceline.train.streams.reader import StreamReader


@dataclass(frozen=True)
class RunContext:
    """Description of a run on a rank, which does not change while the rank trains.

    `data` is set if samples are stored on the nodes, and `reader` if the data is a stream. With
    `uneven_steps`, ranks may have different numbers of iterations of the training loop. With
    `prove`, the loss is checked before the first step (`paceline.train.proof`). Without a control
    plane, rank 0 plans with `policy`, or does not plan if `policy` is None.
    """

    terms: Terms
    environment: Environment
    device: Device
    limits: Limits
    epoch_steps: EpochSteps
    uneven_steps: bool = False
    data: NodeData | None = None
    reader: StreamReader | None = None
    prove: bool = True
    policy: PolicyInForce | None = None

    @property
    def planned(self) -> bool:
        """True if a controller or rank 0 may plan the run."""
        return self.environment.run is not None or self.policy is not None

    @property
    def first_policy(self) -> PolicyInForce | None:
        """The policy with which the run begins; None if there is none, or if it is unknown."""
        environment = self.environment
        has_controller = environment.run is not None and environment.bus is not None
        return environment.first_policy if has_controller else self.policy
