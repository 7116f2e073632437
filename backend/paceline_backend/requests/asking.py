"""Questions to nodes about runs: `Asker` sends them over the bus and waits for signed answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec
import redis
import redis.asyncio

from paceline.core.errors import PacelineError
from paceline.core.outage import Refusals
from paceline.wire import (
    COMMANDS_LENGTH,
    Answer,
    Ask,
    WireError,
    answers,
    commands,
    decode_signed,
    encode,
    signed,
)
from paceline.wire.asking import Question, Reply
from paceline.wire.sealing import SealError, unseal_answer
from paceline_backend.requests.streams import shared

log = logging.getLogger(__name__)

# Deadline for an answer. A node usually answers within a fraction of a second.
ANSWER_S = 5.0
# Seconds after which an answer that was not fetched is deleted.
_ANSWER_KEPT_S = 30
_QUESTION_CONNECTIONS = 4
# Maximum number of concurrent questions. It limits the memory that the bus needs for answers: one
# answer can have 350 kB.
_MOST_QUESTIONS = 64
# Maximum number of concurrent questions to a node, so that a node that does not answer cannot block
# the questions to other nodes.
_OF_NODE = 8
# Pause after the first poll for an answer, and the maximum to which later pauses grow.
_FIRST_POLL_S, _MOST_POLL_S = 0.01, 0.1

_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
Fields = dict[bytes, bytes]


class NoAnswerError(PacelineError):
    """The node does not answer."""


class Asker:
    """Client that asks nodes and verifies the signatures of their answers, on one event loop."""

    def __init__(self, bus_url: str) -> None:
        self._bus_url = bus_url
        self._client: redis.asyncio.Redis | None = None
        self._all = asyncio.Semaphore(_MOST_QUESTIONS)
        self._by_node: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._forged = Refusals(log, "an answer that its node did not write is ignored")

    async def ask(self, node: str, key: bytes, run: str, question: Question) -> Reply:
        """Ask a node about a run, and return its answer. `key` is the node's key.

        Raises:
            NoAnswerError: the node does not answer within `ANSWER_S`.
        """
        ours = self._by_node.setdefault(node, asyncio.Semaphore(_OF_NODE))
        patience_s = ANSWER_S
        try:
            async with asyncio.timeout(patience_s) as limit, ours, self._all:
                return await self._asked(node, key, run, question, limit)
        except TimeoutError as error:
            raise NoAnswerError(
                f"node {node} did not answer within {patience_s:g} s: its agent is unreachable or "
                "busy"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _asked(
        self, node: str, key: bytes, run: str, question: Question, limit: asyncio.Timeout
    ) -> Reply:
        ask = Ask(secrets.token_hex(16), question)
        place, orders = answers(node, ask.id), commands(node)
        entry = signed(encode(ask, run), orders, key)
        async with self._bus().pipeline(transaction=True) as opening:
            # Create the stream for the answer here, with an expiry. Agents add an answer only to an
            # existing stream, so a late answer does not create a stream that never expires.
            opening.xadd(place, {"v": "asked"})
            opening.expire(place, _ANSWER_KEPT_S)
            opening.xadd(orders, cast(Any, entry), maxlen=COMMANDS_LENGTH, approximate=True)
            first, _, order = await opening.execute()
        try:
            return await self._answer(place, first, key, limit)
        finally:
            await asyncio.shield(self._forget(place, orders, order))

    async def _answer(self, place: str, last: bytes, key: bytes, limit: asyncio.Timeout) -> Reply:
        """Poll for the node's answer: a blocking read would need a connection for each question.

        `limit` cancels this task only once, and redis-py can lose the cancellation: it writes with
        `asyncio.wait_for`, which in Python 3.11 can lose a cancellation that arrives when the write
        ends. So the loop also checks `limit`.
        """
        pause_s = _FIRST_POLL_S
        while not limit.expired():
            read: Any = await self._bus().xread({place: last}, count=1)
            for number, fields in read[0][1] if read else []:
                last = number
                if (reply := self._genuine(fields, place, key)) is not None:
                    return reply
            if not read:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
        raise TimeoutError

    def _genuine(self, fields: Fields, place: str, key: bytes) -> Reply | None:
        try:
            _, message = decode_signed(fields, place, key)
            if not isinstance(message, Answer):
                raise WireError(f"expected an Answer, not {type(message).__name__}")
            return _decoder.decode(unseal_answer(message.sealed, key))
        except (WireError, SealError, msgspec.DecodeError) as error:
            self._forged.add(error)
            return None

    async def _forget(self, place: str, orders: str, order: bytes) -> None:
        # The stream of commands has a maximum length: if questions were not deleted, orders to
        # launch could be trimmed. If the bus is unavailable, the question is trimmed later, and the
        # answer expires.
        with contextlib.suppress(redis.RedisError):
            async with self._bus().pipeline(transaction=False) as tidying:
                tidying.unlink(place)
                tidying.xdel(orders, order)
                await tidying.execute()

    def _bus(self) -> redis.asyncio.Redis:
        if self._client is None:
            self._client = shared(
                self._bus_url,
                connections=_QUESTION_CONNECTIONS,
                queued_s=ANSWER_S,
                timeout_s=ANSWER_S,
            )
        return self._client
