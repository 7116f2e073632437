"""A loader that a framework's training loop reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paceline.train.session import Session


class DrivenLoader:
    """A session's loader for the loop of a framework. `place` moves a batch to the device.

    Frameworks count epochs themselves. If a session continues from the very end of an epoch, the
    next pass is therefore the next epoch, whereas `Session.loader` gives an empty pass first.
    """

    def __init__(
        self, session: Session, place: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.dataset = session._dataset
        self._place = place
        self._loader = session.loader(**options)
        self._passing: Generator[Any] | None = None
        # Called once, before the first batch.
        self.begins: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins()
        # The framework left the last pass early, and may still hold it.
        if self._passing is not None:
            self._passing.close()
        passing = self._passing = self._loader.__iter__()
        for batch in passing:
            yield self._place(batch)

    @property
    def running(self) -> bool:
        """Return whether the framework's loop is in a step."""
        return self.session._loop.current.running is not None

    @property
    def in_last_step(self) -> bool:
        """Return whether the loop is in the last step of an epoch."""
        return self.running and self.session._loop.running().step.epoch_end

    def finish(self) -> None:
        """End the epoch if the loop is in its last step.

        A framework that counts steps does not ask for a batch after the last one, so without this
        call the loader does not learn that the loop's body has ended.
        """
        if self.in_last_step and self._passing is not None:
            next(self._passing, None)
            self._passing = None

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a collective of the framework, whose wait is not computing."""
        return self.session._loop.running().meeting() if self.running else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; if it was taken at an epoch's end, with the next epoch."""
        self.session.load_state_dict(state)
        if self.session._loop.progress.epoch_is_done:
            for _ in self._loader:
                raise AssertionError("an epoch that is over has no batch")
