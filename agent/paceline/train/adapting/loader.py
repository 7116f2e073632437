"""The loader that a framework's loop reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paceline.train.session import Session


class DrivenLoader:
    """A session's loader for the loop of a framework.

    Frameworks count epochs themselves. So where a session goes on from the very end of an epoch,
    the next pass is the next epoch: `Session.loader` would give an empty pass first.

    Args:
        session: whose loader it is.
        place: puts a batch onto the device.
        options: of `Session.loader`.
    """

    def __init__(
        self, session: Session, place: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.dataset = session._dataset
        self._place = place
        self._loader = session.loader(**options)
        self._passing: Generator[Any] | None = None
        self.begins: Callable[[], None] | None = None  # called once, before the first batch

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins()
        if self._passing is not None:  # the framework left it early, and may still hold it
            self._passing.close()
        passing = self._passing = self._loader.__iter__()
        for batch in passing:
            yield self._place(batch)

    @property
    def running(self) -> bool:
        """Whether the framework's loop is in a step."""
        return self.session._loop.current.running is not None

    @property
    def in_last_step(self) -> bool:
        """Whether the loop is in an epoch's last step."""
        return self.running and self.session._loop.running().step.epoch_end

    def finish(self) -> None:
        """Ends the epoch if the loop is in its last step.

        A framework that counts steps asks for no batch after the last one, so the loader would not
        know that the loop's body has ended.
        """
        if self.in_last_step and self._passing is not None:
            next(self._passing, None)
            self._passing = None

    def waiting(self) -> AbstractContextManager[None]:
        """Around a collective of the framework's: waiting in it does not count as computing."""
        return self.session._loop.running().meeting() if self.running else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The session's."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken; if that was an epoch's end, with the next epoch."""
        self.session.load_state_dict(state)
        if self.session._loop.at_epoch_end:
            for _ in self._loader:
                raise AssertionError("an epoch that is over has no batch")
