"""The phases of a rank's training."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A phase of a step, or of the time between two steps. A step has its phases in this order."""

    # The rank waits for the next segment of the plan, which rank 0 stores.
    PLAN = "plan"
    # The rank waits for its batch.
    DATA = "data"
    # The rank is in the loop's body, before the last gradient or after the reduction.
    COMPUTE = "compute"
    # The rank is in the reduction of the gradients, which waits for all ranks.
    SYNC = "sync"
    # The rank saves a checkpoint between two steps. All ranks do that and wait for each other.
    CHECKPOINT = "checkpoint"
    # The rank is in the script's code outside of the loop, such as an evaluation.
    SCRIPT = "script"
