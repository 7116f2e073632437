"""A planned segment: which samples each rank gets in the next steps."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire.synchronisation import ALLREDUCE, Synchronisation


class Segment(msgspec.Struct, frozen=True):
    """The plan of steps [first_step, first_step + len(counts)), all in one epoch, and its origin.

    With the run's sizes and the feedback rows of `feedback`, the same policy code gives the same
    plan again. Ranks check nothing: the leader validates before it adopts.
    """

    seq: int  # counts adopted segments of this attempt from 0
    epoch: int
    first_step: int
    counts: list[list[int]]  # [step][rank] samples
    indices: bytes  # little-endian uint32, all steps and ranks in order; see `assignments`
    policy: str  # preset's name
    version: int  # policy version of the run: 0 at the start, +1 at each switch
    source: str  # "controller", or "coast": planned by the leader because nothing came in time
    epoch_end: bool  # the epoch is over after this segment
    ett_s: list[list[float]] = []  # [step][rank] expected compute time; empty: unknown
    shares: list[float] = []  # of the load, per rank, for coasting; empty: equal counts
    feedback: list[tuple[int, int]] = []  # half-open ranges of the steps that the predictor saw
    shuffled: bool = False  # the shuffler ran before this segment was scheduled
    moved: int = 0  # samples that got another holder: shuffled, or given to another rank
    plan_s: float = 0.0  # what planning took
    memory: dict[str, Any] = {}  # what the policy wants to know when it plans the next one
    threads: list[int] = []  # CPU threads of each rank; empty: as the script set them
    synchroniser: Synchronisation = ALLREDUCE
    why: str = ""  # this synchroniser, for the operator; empty: the policy has no other

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.counts)

    def assignments(self) -> list[list[npt.NDArray[np.int64]]]:
        """Sample indices, [step][rank] → int64 array (possibly empty)."""
        flat = np.frombuffer(self.indices, dtype="<u4").astype(np.int64)
        ends = np.cumsum([n for row in self.counts for n in row])
        parts = iter(np.split(flat, ends[:-1]) if len(ends) else [])
        return [[next(parts) for _ in row] for row in self.counts]


def pack_indices(assignments: list[list[npt.NDArray[np.int64]]]) -> tuple[list[list[int]], bytes]:
    """`Segment.counts` and `Segment.indices` of [step][rank] index arrays."""
    counts = [[len(part) for part in step] for step in assignments]
    flat = [part for step in assignments for part in step]
    joined = np.concatenate(flat) if flat else np.empty(0)
    return counts, joined.astype("<u4").tobytes()
