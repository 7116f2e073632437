"""Interface between the simulation and the models of gradient synchronisation.

The simulation passes `Work` to `SimulatedSync.run` and gets a `SimulatedTimeline`. `Dealing`,
`Bodies` and `Prices` are for segments in which ranks take over batches from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.policies.base import Floats, Ints


@dataclass(frozen=True)
class Costs:
    """Durations of exchanges among ranks, without the time that ranks wait for each other."""

    # Duration of a round of all ranks: a reduction of gradients, or a mean of replicas.
    round_s: float = 0.0
    # Time from a rank's request to start a round until all ranks have received the request.
    call_s: float = 0.0
    # Number of bytes that a rank sends in an exchange.
    bytes: int = 0
    # Time in seconds that each rank takes in each step in addition to loading and computing; a
    # number for all ranks, or [W].
    own_s: Floats | float = 0.0
    # Time to send a vector to another rank and get one back; None: `round_s`.
    pair_s: float | None = None
    # Function from a round's number of ranks to the round's duration; None: `round_s`.
    group_s: Callable[[int], float] | None = None

    def exchange_s(self) -> float:
        """Return the seconds to send a vector to another rank and get one back."""
        return self.round_s if self.pair_s is None else self.pair_s

    def among(self, ranks: int) -> Costs:
        """Return the costs of exchanges in a group of `ranks` ranks."""
        return self if self.group_s is None else replace(self, round_s=self.group_s(ranks))


class Prices(NamedTuple):
    """Times that the planned batches of one step would take on other ranks.

    A batch with effective load Λ' and n samples takes rank j ``load_s[j] · Λ' + sample_s[j] · n +
    batch_s[j]`` seconds, including data loading. `load` has the Λ' of the batch that was planned
    for each rank.
    """

    load: Floats  # [W]
    load_s: Floats  # [W]
    sample_s: Floats  # [W]
    batch_s: Floats  # [W]


@dataclass(frozen=True)
class Bodies:
    """The batches that each rank trains in a span of R steps, one after the other.

    `paceline.core.pool` defines spans.

    Arrays are [N, W]. N is the maximum number of batches of a rank, but at least 1.
    """

    # First step of the span, counted within the segment.
    first: int
    # Number of steps of the span, R.
    span: int
    # Each rank's number of batches.
    count: Ints  # [W]
    # The planned batch, as step of the segment × W + rank; -1: there is no batch.
    batch: Ints
    # Step of the segment whose record includes the batch; the span's last step if there is no
    # batch.
    step: Ints
    work_s: Floats
    samples: Ints

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """Mask of the batches that each rank has, [N, W]."""
        return np.asarray(self.batch >= 0, bool)

    @property
    def taken(self) -> npt.NDArray[np.bool_]:
        """Mask of the batches that were planned for another rank, [N, W]."""
        world = self.batch.shape[1]
        return np.asarray(self.made & (self.batch % world != np.arange(world)), bool)

    def reported(self, values: npt.NDArray[Any], most: bool = False) -> npt.NDArray[Any]:
        """Return the sum of the trained batches' `values`, [N, W], for each record, [R, W].

        With `most`, return the largest value for each record instead of the sum.
        """
        world = self.batch.shape[1]
        table = np.zeros((self.span, world), values.dtype)
        at = (self.step - self.first, np.broadcast_to(np.arange(world), self.step.shape))
        (np.maximum if most else np.add).at(table, at, values)
        return table

    def of_planned(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value of each trained batch, [N, W], from values of planned batches, [S, W].

        The value is 0 where a rank has no batch.
        """
        return np.where(self.made, table.ravel()[self.batch], 0)


class Dealing(Protocol):
    """The simulator's functions that a model needs to move batches between ranks."""

    def room(self, rank: int) -> int:
        """Return the number of samples for which a rank's memory has room."""
        ...

    def prices(self, at: int) -> Prices:
        """Return each rank's times for the planned batches of a step of the segment."""
        ...

    def pool(self, bodies: Bodies) -> None:
        """Record the batches that each rank trains in a span.

        `SimulatedPool` calls this once for each span in which batches differ from the plan.
        """
        ...


@dataclass(frozen=True)
class Work:
    """The work of W ranks in a segment of S steps, where S may be 0.

    If ranks run different numbers of steps, S is the largest number, and the rows beyond a rank's
    own number are ignored. The ranks' steps then replace `planned` steps of the plan; see `pool`.
    """

    # Number of the first step, counted over the run.
    first_step: int
    # Time in seconds that each rank takes to load and compute each step, without waiting.
    work_s: Floats  # [S, W]
    samples: Ints  # [S, W]
    # Time in seconds of each step's all-reduce on each rank.
    all_reduce_s: Floats  # [S, W]
    costs: Costs
    # True if the epoch ends with the last step.
    epoch_end: bool = False
    # Times of batches on other ranks; None: batches do not move between ranks.
    dealing: Dealing | None = None
    # Each rank's number of steps; None: S.
    steps: Ints | None = None  # [W]
    # Number of steps that the segment's plan had, if ranks run different numbers of steps instead;
    # None: S.
    planned: int | None = None

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """Mask of the steps that each rank runs, [S, W]."""
        at, shape = np.arange(len(self.work_s))[:, None], self.work_s.shape
        return np.broadcast_to(True if self.steps is None else at < self.steps, shape)

    def of_ranks(self, table: npt.NDArray[Any]) -> list[list[Any]]:
        """Return the values of each rank in a table, [S, W], as lists: [W][the rank's steps]."""
        columns: list[list[Any]] = table.T.tolist()
        if self.steps is None:
            return columns
        return [column[:end] for column, end in zip(columns, self.steps, strict=True)]

    def table(self, of_ranks: list[list[float]]) -> Floats:
        """Return the ranks' lists of values as a table, [S, W]; 0 beyond a rank's last step."""
        if self.steps is None:
            return np.array(of_ranks).T
        made = np.zeros(self.work_s.shape)
        for rank, column in enumerate(of_ranks):
            made[: len(column), rank] = column
        return made


@dataclass(frozen=True)
class SimulatedRound:
    """An exchange; see `paceline.wire.RoundRecord`."""

    # Number of the exchange in its segment.
    number: int
    # The reporting rank's step during the exchange, counted from the segment's first step.
    step: int
    contributors: int
    # Number of contributed gradients by age in rounds, from 0; the last value includes all higher
    # ages.
    staleness: list[int]
    # Number of samples whose gradients were dropped as too old.
    dropped: int
    # Response time in seconds; docs/glossary.md defines it.
    waited_s: float
    reduced_s: float
    # Number of bytes that a rank sent.
    bytes: int
    ended_at: float
    # The reporting rank.
    rank: int = 0
    # Number of ranks in the exchange; None: all ranks.
    world: int | None = None


@dataclass(frozen=True)
class SimulatedTimeline:
    """Times of a segment; arrays are [S, W].

    A rank's step consists of its work (`work_s`, as in `Work`), then `wait_s`, then
    `communication_s`. If a rank continues to compute while gradients are exchanged,
    `communication_s` is 0. If ranks run different numbers of steps, the last row has each rank's
    wait at the end of these steps, also for ranks with fewer steps.
    """

    work_s: Floats
    wait_s: Floats
    communication_s: Floats
    rounds: list[SimulatedRound]


class SimulatedSync(Protocol):
    """A model of the ranks' waiting for each other, on the virtual clock.

    The same arguments give the same timeline. Not thread-safe.
    """

    # True: if the next segment has the same synchronisation, ranks continue into it without
    # synchronising, with the same object. False: all ranks synchronise at the segment's end, and
    # each segment has an object of its own.
    goes_on: bool

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """Simulate the next segment and return its timeline.

        `starts` has the time at which each rank begins, [W]; all are equal unless `goes_on`.
        """
        ...

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """Return the time at which all ranks have synchronised after they stopped at `starts`, [W].

        Ranks stop if the next segment has another synchronisation.
        """
        ...
