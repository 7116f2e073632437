"""Check whether the tokens of open event streams are still valid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from paceline_backend.store import StoreError

# A stream may outlive its token by this time.
CHECK_S = 2.0  # seconds
# Answers are dropped after this time. Every open stream has asked again by then.
_KEPT_S = 60.0  # seconds

log = logging.getLogger(__name__)


@dataclass
class _TokenCheck:
    # Time by the event loop's clock.
    at: float
    # The guard has just checked the token of a new stream.
    valid: bool = True


class Rights:
    """Check of the tokens of open streams, once per token every `CHECK_S` seconds.

    `holds` returns whether a token is still valid, by its ID. It is called in a thread.
    """

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._answers: dict[str, _TokenCheck] = {}

    async def valid(self, token: str) -> bool:
        """Return whether a token is still valid; without the database, the last answer counts."""
        now = asyncio.get_running_loop().time()
        known = self._answers.get(token)
        if known is not None and now < known.at + CHECK_S:
            return known.valid
        known = self._answers[token] = known or _TokenCheck(now)
        # Set the time before the call, so that other streams do not ask meanwhile.
        known.at = now
        try:
            known.valid = await run_in_threadpool(self._holds, token)
        except StoreError as error:
            log.debug("cannot check whether a token is still valid: %s", error)
        self._answers = {t: a for t, a in self._answers.items() if a.at + _KEPT_S > now}
        return known.valid
