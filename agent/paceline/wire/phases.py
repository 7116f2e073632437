"""What a rank does at a moment of its training."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A part of a step, or what lies between two of them. A step goes through them in order."""

    PLAN = "plan"  # waits for the plan's next segment, which rank 0 stores
    DATA = "data"  # waits for its batch
    COMPUTE = "compute"  # in the loop's body, before the last gradient or behind the reduction
    SYNC = "sync"  # in the reduction of the gradients, which waits for all ranks
    CHECKPOINT = "checkpoint"  # saves one, between two steps: all ranks do, and wait for each other
    SCRIPT = "script"  # in the script's own code outside of the loop, as in an evaluation
