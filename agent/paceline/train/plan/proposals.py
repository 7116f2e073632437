"""Plans that are offered to the leader, and operators' orders: from the bus, or from rank 0 itself.

`Proposals` keeps plans and orders for the leader. `ControlStream` receives those that the control
plane sends; `paceline.train.plan.local` plans on rank 0 while no controller does.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import redis

from paceline.core.outage import Outage, Refusals
from paceline.wire import (
    LOCAL,
    ForgedError,
    Proposal,
    StopTraining,
    WireError,
    control,
    decode_signed,
)
from paceline.wire.bus import connect

logger = logging.getLogger(__name__)

_BLOCK_MS = 250
_RETRY_S = 0.5


class Proposals:
    """Plans offered to one attempt's leader. Thread-safe.

    The leader gets the newest proposal for each segment. A local proposal never replaces one of a
    controller.
    """

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._proposals: dict[int, Proposal] = {}
        self._changed = threading.Condition()
        # Number of proposals so far, and the newest one.
        self.received = 0
        self.newest: Proposal | None = None
        # The newest proposal of a controller, and the monotonic time at which it arrived.
        self.by_controller: Proposal | None = None
        self.controller_at = 0.0
        self.stop_reason: str | None = None

    def offer(self, proposal: Proposal) -> None:
        """Add a proposal; those for other attempts are ignored."""
        if proposal.attempt != self._attempt:
            return
        seq = proposal.plan.seq
        with self._changed:
            if proposal.plan.source != LOCAL:
                self.by_controller, self.controller_at = proposal, time.monotonic()
            elif (known := self._proposals.get(seq)) and known.plan.source != LOCAL:
                return
            self._proposals[seq] = self.newest = proposal
            self.received += 1
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Order the leader to end the plan."""
        with self._changed:
            self.stop_reason = reason
            self._changed.notify_all()

    def take(self, seq: int, wait_s: float) -> Proposal | None:
        """Return the proposal for a segment; None if none arrives within `wait_s` seconds.

        Proposals for this segment and for earlier ones are discarded.
        """
        with self._changed:
            self._changed.wait_for(lambda: seq in self._proposals or self.stop_reason, wait_s)
            proposal = self._proposals.get(seq)
            self._proposals = {key: p for key, p in self._proposals.items() if key > seq}
            return proposal


class ControlStream:
    """Background thread that receives the control plane's messages for one attempt.

    The thread reads the run's control stream from its start. So a proposal for this attempt counts
    even if it was sent before the attempt began. An outage of the bus does not end the thread: it
    retries until `close`.

    Args:
        bus: Redis URL.
        run: public run id.
        proposals: gets the plans and orders.
        key: the run's key; entries without a MAC by this key are ignored. None: no MAC is required.
        first_attempt: number of the first attempt of the newest launch; orders to stop earlier
            launches are ignored.
    """

    def __init__(
        self,
        bus: str,
        run: str,
        proposals: Proposals,
        key: bytes | None = None,
        *,
        first_attempt: int = 0,
    ) -> None:
        self._client = connect(bus)
        self._stream = control(run)
        self._proposals = proposals
        self._first_attempt = first_attempt
        self._key = key
        self._forged = Refusals(logger, "ignored a message that is not from the control plane")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Return the number of entries that were ignored because their MAC is missing or wrong."""
        return self._forged.count

    def close(self) -> None:
        """End the thread. Wait for it at most 1 s, because its connection may be dead."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        last = b"0-0"
        outage = Outage(
            logger,
            "the bus does not answer; training continues",
            "the bus answers again",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )
        while not self._closing.is_set():
            try:
                answer: Any = self._client.xread({self._stream: last}, count=100, block=_BLOCK_MS)
            except redis.RedisError as error:
                self._closing.wait(outage.failed(error))
                continue
            outage.succeeded()
            for entry, fields in answer[0][1] if answer else []:
                self._receive(fields)
                last = entry
        self._client.close()

    def _receive(self, fields: dict[bytes, bytes]) -> None:
        try:
            _, message = decode_signed(fields, self._stream, self._key)
        except ForgedError as error:
            self._forged.add(error)
            return
        except WireError as error:
            logger.warning("unreadable message from the controller: %s", error)
            return
        if isinstance(message, Proposal):
            self._proposals.offer(message)
        elif isinstance(message, StopTraining) and message.meant(self._first_attempt):
            self._proposals.stop(message.reason)
