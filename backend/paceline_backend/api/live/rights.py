"""Whether those who opened event streams may still have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from paceline_backend.store import StoreError

CHECK_S = 2.0  # how long a stream outlives its token
_KEPT_S = 60.0  # all open streams have asked again by then

log = logging.getLogger(__name__)


@dataclass
class _Answer:
    at: float  # of the loop's clock
    valid: bool = True  # the guard has just asked


class Rights:
    """Asks about the token of open streams every two seconds, once for all streams of a token.

    Args:
        holds: whether a token's id is still worth something; in a thread.
    """

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._answers: dict[str, _Answer] = {}

    async def valid(self, token: str) -> bool:
        """Whether a token, by its id, is still valid; while the database is away: as it was."""
        now = asyncio.get_running_loop().time()
        known = self._answers.get(token)
        if known is not None and now < known.at + CHECK_S:
            return known.valid
        known = self._answers[token] = known or _Answer(now)
        known.at = now  # before the answer is there: other streams do not ask meanwhile
        try:
            known.valid = await run_in_threadpool(self._holds, token)
        except StoreError as error:
            log.debug("whether a token is still valid is unknown: %s", error)
        self._answers = {t: a for t, a in self._answers.items() if a.at + _KEPT_S > now}
        return known.valid
