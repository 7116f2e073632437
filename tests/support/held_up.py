"""A benchmark's training in which a rank is held up before each segment of shared batches."""

from __future__ import annotations

from typing import Any
from unittest import mock


def train(work: Any, meet_s: float) -> Any:
    """Trains on this rank; rank 1 leaves its batches to the others whenever it may.

    Args:
        work: see `trainings.Work`.
        meet_s: how long ranks wait for each other where counting begins.
    """
    import torch.distributed as dist
    import trainings

    from paceline.core import pool

    may = pool.is_worth_it

    def is_worth_it(shares: Any, rank: int, batch_s: float) -> bool:
        if rank == 1:
            return not pool.has_working_peer(shares, rank)
        return may(shares, rank, batch_s)

    with (
        mock.patch.object(trainings, "MEET_S", meet_s),
        mock.patch.object(pool, "is_worth_it", is_worth_it),
    ):
        trained = trainings.train(work)
    dist.barrier()
    return trained
