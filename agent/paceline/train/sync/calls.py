"""Calls of the rounds of a partial all-reduce, by one key for each round in the ranks' store."""

from __future__ import annotations

from paceline.core.errors import PacelineError
from paceline.train.sync.base import Ranks

_GO, _ABORT = "go", "abort "


class RoundCalls:
    """The calls of a segment's rounds. For two threads: only one may call `wait` and `forget`."""

    def __init__(self, ranks: Ranks, prefix: str) -> None:
        self._ranks, self._prefix = ranks, prefix

    def key(self, number: int) -> str:
        """Return the key that calls a round."""
        return f"{self._prefix}/{number}"

    def call(self, number: int) -> None:
        """Call a round, unless it has been called."""
        self._ranks.store.compare_set(self.key(number), "", _GO)

    def count_ready(self, number: int) -> int:
        """Count this rank as ready for a round; return how many ranks are ready now."""
        return int(self._ranks.store.add(f"{self.key(number)}/ready", 1))

    def abort(self, number: int, reason: str) -> None:
        """End all ranks' rounds, because this rank leaves.

        If round `number`, the next or current one, has been called, it completes, and the one after
        it ends with the reason.
        """
        word = f"{_ABORT}rank {self._ranks.of_run(self._ranks.rank)} {reason}"
        while self._ranks.store.compare_set(self.key(number), "", word) != word.encode():
            number += 1

    def wait(self, number: int) -> None:
        """Wait until a round is called; raise a PacelineError if a rank has left instead."""
        word = self._ranks.blocking_store.get(self.key(number)).decode()
        if word.startswith(_ABORT):
            raise PacelineError(word.removeprefix(_ABORT))

    def forget(self, number: int) -> None:
        """Delete the keys of a round that no rank waits for any longer."""
        for part in ("", "/ready"):
            self._ranks.blocking_store.delete_key(f"{self.key(number)}{part}")
