"""How a loop was left: its iterator is closed alike by a break and by an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from paceline.train.sync.discovery import exception_ends_loop


class BoomError(Exception):
    """What a body raises."""


class Loader:
    def __init__(self) -> None:
        self.raised: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            self._over()

    def _over(self) -> None:
        self.raised.append(exception_ends_loop())


Looped = Callable[[], Iterable[object]]  # a loop alone has what it returns


def boom() -> None:
    raise BoomError


def around(loader: Iterable[object]) -> Iterator[object]:
    yield from enumerate(loader)


def breaks(looped: Looped) -> None:
    for _ in looped():
        break


def breaks_where_it_raised(looped: Looped) -> None:
    for _ in looped():
        try:
            boom()
        except BoomError:
            break


def breaks_while_it_handles(looped: Looped) -> None:
    try:
        boom()
    except BoomError:
        breaks(looped)


def returns(looped: Looped) -> None:
    for _ in looped():
        return


def runs_out(looped: Looped) -> None:
    for _ in looped():
        pass


def throws(looped: Looped) -> None:
    for _ in looped():
        boom()


def throws_at_once(looped: Looped) -> None:
    for _ in looped():
        raise BoomError


def throws_through(looped: Looped) -> None:
    try:
        for _ in looped():
            boom()
    finally:
        str(looped)


LEFT = [breaks, breaks_where_it_raised, breaks_while_it_handles, returns, runs_out]
RAISED = [throws, throws_at_once, throws_through]


@pytest.mark.parametrize("wrapped", [iter, enumerate, around])
@pytest.mark.parametrize("script", LEFT + RAISED)
def test_an_exception_that_ends_a_loop_is_seen(
    script: Callable[[Looped], None],
    wrapped: Callable[[Iterable[object]], Iterable[object]],
) -> None:
    loader = Loader()
    try:
        script(lambda: wrapped(loader))
    except BoomError:
        assert script in RAISED
    assert loader.raised == [script in RAISED]
