"""Which nodes take part in an attempt, and its number: all launchers of a run agree on both."""

from __future__ import annotations

import time

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

# Clocks that are apart by less count as equal: an answer of the store may take as long.
_APART_S = 1.0


class Failure(msgspec.Struct, frozen=True):
    """The first failure of a node's ranks in a round."""

    node: str
    at: float  # the failed rank's last word, by the node's clock; in a `Round` by the caller's
    exit_code: int
    message: str
    brief: str = ""  # without anything of what ranks have printed


class Entry(msgspec.Struct, frozen=True):
    """What one launcher says when a round of the rendezvous is complete."""

    node: str
    failure: Failure | None  # of its ranks in the round before
    before: list[str]  # nodes of the round before, as this launcher knows them; empty: it is new


class Round(msgspec.Struct, frozen=True):
    """What all launchers know then."""

    attempt: int
    nodes: list[str]  # in the order of their ranks
    failures: int  # of ranks so far, without those as nodes joined or were lost
    cause: Failure | None = None  # the first of the round before


class _Called(msgspec.Struct, frozen=True):
    round: Round
    at: float  # by the clock of the launcher that calls the roll


class Roll:
    """Calls the roll after each round of the rendezvous.

    An attempt that fails as a node joins or is lost counts as no failure: its ranks could do
    nothing else. So the run survives changes of its nodes also if it may not be restarted.

    Args:
        store: of all rounds.
        node: this one's name.
        first: number of the first attempt.
    """

    def __init__(self, store: Store, node: str, first: int) -> None:
        self._store = store
        self.node = node
        self.first = first
        self._nodes: list[str] = []
        self._ahead_s = 0.0  # this node's clock, of the caller's in the latest round

    def call(self, store: Store, index: int, count: int, failure: Failure | None) -> Round:
        """Waits for all launchers of a round.

        Args:
            store: of this round.
            index: of this launcher among them.
            count: of launchers.
            failure: of this launcher's ranks in the round before.

        Raises:
            RuntimeError: the store is gone, or a launcher does not come.
        """
        if failure is not None:
            failure = msgspec.structs.replace(failure, at=failure.at - self._ahead_s)
        entry = Entry(self.node, failure, self._nodes)
        store.set(f"roll/{index}", msgspec.json.encode(entry).decode())
        if index == 0:
            entries = [
                msgspec.json.decode(store.get(f"roll/{each}"), type=Entry) for each in range(count)
            ]
            called = _Called(self._round(entries), time.time())
            store.set("roll", msgspec.json.encode(called).decode())
        called = msgspec.json.decode(store.get("roll"), type=_Called)
        ahead_s = time.time() - called.at
        self._ahead_s = ahead_s if abs(ahead_s) > _APART_S else 0.0
        self._nodes = called.round.nodes
        return called.round

    def _round(self, entries: list[Entry]) -> Round:
        nodes = [entry.node for entry in entries]
        attempt = self.first + self._store.add("rounds", 1) - 1
        moved = any(set(entry.before) != set(nodes) for entry in entries)
        failures = [entry.failure for entry in entries if entry.failure is not None]
        count = self._store.add("failures", int(bool(failures) and not moved))
        return Round(attempt, nodes, count, min(failures, key=lambda each: each.at, default=None))
