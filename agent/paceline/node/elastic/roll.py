"""The roll call at the start of an attempt: all launchers agree on its number and nodes."""

from __future__ import annotations

import time

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

# Clocks whose difference is measured as less than this many seconds count as equal, because the
# measurement includes the time that the store takes to reply.
_APART_S = 1.0


class FirstFailure(msgspec.Struct, frozen=True):
    """The first failure of a node's ranks in a round of the rendezvous."""

    node: str
    # Time at which the failed rank last wrote to its log, on the node's clock. In a `RollEntry` and
    # in a `RollRound`, it is on the clock of the launcher that made the previous roll call.
    at: float
    exit_code: int
    message: str
    # The message without output of ranks.
    brief: str = ""


class RollEntry(msgspec.Struct, frozen=True):
    """One launcher's answer to the roll call, after a round of the rendezvous is complete."""

    node: str
    # Failure of this launcher's ranks in the previous round.
    failure: FirstFailure | None
    # Nodes of the previous round in which this launcher took part; empty: the launcher is new.
    before: list[str]


class RollRound(msgspec.Struct, frozen=True):
    """The result of a roll call, which is the same for all launchers."""

    attempt: int
    # Names of the nodes, in the order of their ranks.
    nodes: list[str]
    # Number of the run's attempts that have failed so far. An attempt during which a node joined
    # or was lost does not count.
    failures: int
    # The first failure of the previous round.
    cause: FirstFailure | None = None


class _Called(msgspec.Struct, frozen=True):
    round: RollRound
    # Time of the roll call, on the clock of the launcher that makes it.
    at: float


class Roll:
    """The roll call of the launchers after each round of the rendezvous.

    If a node joined or was lost during a failed attempt, the failure does not count, because the
    ranks did not cause it. So the run survives changes of its nodes even if no restarts are
    allowed. `store` is shared by all rounds; `first` is the number of the first attempt.
    """

    def __init__(self, store: Store, node: str, first: int) -> None:
        self._store = store
        self.node = node
        self.first = first
        self._nodes: list[str] = []
        # Seconds by which this node's clock is ahead of the clock of the launcher that made the
        # newest roll call.
        self._ahead_s = 0.0

    def call(self, store: Store, index: int, count: int, failure: FirstFailure | None) -> RollRound:
        """Wait for the answers of all launchers of a round, and return the result of the roll call.

        `store` is the store of this round, `index` this launcher's index among `count` launchers,
        and `failure` the failure of this launcher's ranks in the previous round. Raise a
        RuntimeError if the store is gone, or if a launcher does not answer.
        """
        if failure is not None:
            failure = msgspec.structs.replace(failure, at=failure.at - self._ahead_s)
        entry = RollEntry(self.node, failure, self._nodes)
        store.set(f"roll/{index}", msgspec.json.encode(entry).decode())
        if index == 0:
            entries = [
                msgspec.json.decode(store.get(f"roll/{each}"), type=RollEntry)
                for each in range(count)
            ]
            called = _Called(self._round(entries), time.time())
            store.set("roll", msgspec.json.encode(called).decode())
        called = msgspec.json.decode(store.get("roll"), type=_Called)
        ahead_s = time.time() - called.at
        self._ahead_s = ahead_s if abs(ahead_s) > _APART_S else 0.0
        self._nodes = called.round.nodes
        return called.round

    def _round(self, entries: list[RollEntry]) -> RollRound:
        nodes = [entry.node for entry in entries]
        attempt = self.first + self._store.add("rounds", 1) - 1
        moved = any(set(entry.before) != set(nodes) for entry in entries)
        failures = [entry.failure for entry in entries if entry.failure is not None]
        count = self._store.add("failures", int(bool(failures) and not moved))
        return RollRound(
            attempt, nodes, count, min(failures, key=lambda each: each.at, default=None)
        )
