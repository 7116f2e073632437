"""What a synchroniser is to the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.stealing import Piece
from paceline_backend.policies.base import Floats, Ints


@dataclass(frozen=True)
class Costs:
    """What exchanges among ranks take, besides waiting for each other."""

    round_s: float = 0.0  # of all ranks: a reduction of gradients, or a mean of replicas
    call_s: float = 0.0  # from when a partial round may be called until all know that it is
    bytes: int = 0  # that a rank gives to one
    own_s: Floats | float = 0.0  # [W] of each rank in each step, besides loading and computing
    pair_s: float | None = None  # a vector to another rank, and one back; None: as a round of all
    group_s: Callable[[int], float] | None = None  # a round of so many ranks; None: as one of all

    def exchange_s(self) -> float:
        """What a vector to another rank takes, and one back."""
        return self.round_s if self.pair_s is None else self.pair_s

    def among(self, ranks: int) -> Costs:
        """Of a group of so many ranks."""
        return self if self.group_s is None else replace(self, round_s=self.group_s(ranks))


class Dealing(Protocol):
    """Batches other than those that were planned."""

    def work_s(self, rank: int, at: int, pieces: list[Piece]) -> tuple[float, int]:
        """What a step of the segment takes a rank with these pieces of batches, and their samples.

        Called once for each step that is not as planned, when the rank begins it.
        """
        ...

    def room(self, rank: int, samples: int) -> int:
        """How many samples a rank may take on besides so many."""
        ...


@dataclass(frozen=True)
class Work:
    """What ranks do in a segment; S steps, of which there may be none.

    Where ranks make different numbers of steps, S is the largest, and what is beyond a rank's own
    number counts for nothing.
    """

    first_step: int  # of the run
    work_s: Floats  # [S, W] loading and computing: all that a rank does by itself
    samples: Ints  # [S, W]
    all_reduce_s: Floats  # [S, W] what an all-reduce of each step takes
    costs: Costs
    epoch_end: bool = False  # the epoch is over with the last step
    dealing: Dealing | None = None  # where samples may move between ranks
    steps: Ints | None = None  # [W] of each rank; None: S

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """Which rank makes which step, [S, W]."""
        at, shape = np.arange(len(self.work_s))[:, None], self.work_s.shape
        return np.broadcast_to(True if self.steps is None else at < self.steps, shape)

    def of_ranks(self, table: npt.NDArray[Any]) -> list[list[Any]]:
        """The steps of each rank in a table [S, W]: [W][its steps]."""
        columns: list[list[Any]] = table.T.tolist()
        if self.steps is None:
            return columns
        return [column[:end] for column, end in zip(columns, self.steps, strict=True)]

    def table(self, of_ranks: list[list[float]]) -> Floats:
        """The reverse of `of_ranks`: 0 beyond a rank's own number of steps."""
        if self.steps is None:
            return np.array(of_ranks).T
        made = np.zeros(self.work_s.shape)
        for rank, column in enumerate(of_ranks):
            made[: len(column), rank] = column
        return made


@dataclass(frozen=True)
class Round:
    """An exchange; see `paceline.wire.RoundRecord`."""

    number: int  # in its segment
    step: int  # index of the one that the rank which tells it was in
    contributors: int
    staleness: list[int]  # gradients that went in, by how many rounds old; the last: or older
    dropped: int  # samples whose gradients were too old
    waited_s: float
    reduced_s: float
    bytes: int  # that a rank gave to it
    ended_at: float
    rank: int = 0  # that tells it
    world: int | None = None  # ranks that took part; None: all


@dataclass(frozen=True)
class Timeline:
    """How a segment went; arrays are [S, W].

    A rank's step is its work, then `wait_s`, then `communication_s`. Where a rank computes on while
    gradients are exchanged, `communication_s` is 0.
    """

    work_s: Floats  # of `Work`, but where samples moved
    wait_s: Floats
    communication_s: Floats
    rounds: list[Round]


class Synchroniser(Protocol):
    """How ranks' steps hang together, on the virtual clock.

    Made when it comes into force; the same arguments give the same timeline. For one thread.
    """

    # With the next segment, if that has the same one; else all have met at the end of the last, and
    # the next one's is made anew.
    goes_on: bool

    def run(self, starts: Floats, work: Work) -> Timeline:
        """The timeline of the next segment.

        Args:
            starts: when each rank begins, [W]; alike for all but where it goes on.
            work: of the segment.
        """
        ...

    def meet(self, starts: Floats, costs: Costs) -> float:
        """When all ranks have met, where it went on until `starts`, [W], and ends now."""
        ...
