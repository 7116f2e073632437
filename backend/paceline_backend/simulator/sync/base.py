"""What a synchroniser is to the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline_backend.policies.base import Floats, Ints


@dataclass(frozen=True)
class Costs:
    """What exchanges among ranks take, without waiting for each other."""

    round_s: float = 0.0  # s of a round of all ranks: a reduction of gradients, a mean of replicas
    call_s: float = 0.0  # s from a rank's call of a partial round until all ranks know of it
    bytes: int = 0  # that a rank gives to an exchange
    own_s: Floats | float = 0.0  # [W] s of each rank in each step, besides loading and computing
    pair_s: float | None = None  # s of a vector to another rank and one back; None: `round_s`
    group_s: Callable[[int], float] | None = None  # s of a round by its ranks; None: `round_s`

    def exchange_s(self) -> float:
        """Seconds that a vector to another rank and one back take."""
        return self.round_s if self.pair_s is None else self.pair_s

    def among(self, ranks: int) -> Costs:
        """The costs in a group of this many ranks."""
        return self if self.group_s is None else replace(self, round_s=self.group_s(ranks))


class Prices(NamedTuple):
    """What planned batches take other ranks: ``load_s · load + sample_s · n + batch_s`` seconds."""

    load: Floats  # [W] effective load of each rank's planned batch
    load_s: Floats  # [W]
    sample_s: Floats  # [W]
    batch_s: Floats  # [W]; with loading


@dataclass(frozen=True)
class Bodies:
    """What each rank trains in a span of R steps, batch after batch.

    Arrays are [N, W]. N is the most batches of a rank, and at least 1.
    """

    first: int  # step of the segment with which the span begins
    span: int  # R
    count: Ints  # [W] each rank's number of batches
    batch: Ints  # the planned batch, as step of the segment × W + rank; -1: none
    step: Ints  # of the segment, in whose record a rank reports the batch; without one the last
    work_s: Floats
    samples: Ints

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """Which rank has how many batches, [N, W]."""
        return np.asarray(self.batch >= 0, bool)

    @property
    def taken(self) -> npt.NDArray[np.bool_]:
        """Which batches were another rank's, [N, W]."""
        world = self.batch.shape[1]
        return np.asarray(self.made & (self.batch % world != np.arange(world)), bool)

    def reported(self, values: npt.NDArray[Any], most: bool = False) -> npt.NDArray[Any]:
        """Values of batches, [N, W], as sums (or maxima) by record, [R, W]."""
        world = self.batch.shape[1]
        table = np.zeros((self.span, world), values.dtype)
        at = (self.step - self.first, np.broadcast_to(np.arange(world), self.step.shape))
        (np.maximum if most else np.add).at(table, at, values)
        return table

    def of_planned(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A table of the segment's planned batches, [S, W], as [N, W]; 0 without a batch."""
        return np.where(self.made, table.ravel()[self.batch], 0)


class Dealing(Protocol):
    """What batches take ranks that were not planned for them."""

    def room(self, rank: int) -> int:
        """How many samples a rank's memory has room for."""
        ...

    def prices(self, at: int) -> Prices:
        """What the planned batches of a step of the segment take each rank."""
        ...

    def pool(self, bodies: Bodies) -> None:
        """Notes what each rank trains in a span. Called once for a span that is not as planned."""
        ...


@dataclass(frozen=True)
class Work:
    """What ranks do in a segment of S steps. S may be 0.

    Where ranks make different numbers of steps, S is the largest number, and values beyond a rank's
    own number are ignored. Such work is a span that ends with one step of the plan for all ranks.
    """

    first_step: int  # of the run
    work_s: Floats  # [S, W] s of loading and computing: all that a rank does by itself
    samples: Ints  # [S, W]
    all_reduce_s: Floats  # [S, W] s of each step's all-reduce
    costs: Costs
    epoch_end: bool = False  # the epoch is over with the last step
    dealing: Dealing | None = None  # None: batches do not move between ranks
    steps: Ints | None = None  # [W] each rank's number of steps; None: S
    planned: int | None = None  # steps of the plan that the work is of; None: S

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
    step: int  # of the segment, in which the reporting rank was
    contributors: int
    staleness: list[int]  # gradients that went in, by age in rounds; the last: that age or more
    dropped: int  # samples whose gradients were too old
    waited_s: float  # response time; see the glossary
    reduced_s: float
    bytes: int  # that a rank gave
    ended_at: float
    rank: int = 0  # the reporting rank
    world: int | None = None  # ranks that took part; None: all


@dataclass(frozen=True)
class Timeline:
    """How a segment went; arrays are [S, W].

    A rank's step is its work, then `wait_s`, then `communication_s`. Where a rank computes on while
    gradients are exchanged, `communication_s` is 0. Where ranks make different numbers of steps,
    the last row has the wait for the end of all, also that of ranks with fewer steps.
    """

    work_s: Floats  # that of `Work`
    wait_s: Floats
    communication_s: Floats
    rounds: list[Round]


class Synchroniser(Protocol):
    """How ranks wait for each other, on the virtual clock.

    Made when the synchroniser comes into force. The same arguments give the same timeline. For one
    thread.
    """

    # Whether ranks go on into the next segment without meeting, if that has the same synchroniser.
    # Otherwise all meet at the segment's end, and each segment has an object of its own.
    goes_on: bool

    def run(self, starts: Floats, work: Work) -> Timeline:
        """The timeline of the next segment.

        Args:
            starts: when each rank begins, [W]; equal unless the synchroniser goes on.
            work: of the segment.
        """
        ...

    def meet(self, starts: Floats, costs: Costs) -> float:
        """When all ranks have met, if the synchroniser ends with ranks at `starts`, [W]."""
        ...
