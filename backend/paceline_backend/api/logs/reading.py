"""Logs of runs, read on the nodes that have them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool

from paceline.wire.asking import ListLogs, LogFile, LogList, LogPart, ReadLog
from paceline_backend.api.errors import ProblemError
from paceline_backend.api.logs.asking import ask, missing, refusal
from paceline_backend.api.logs.holders import LogHolder, holders
from paceline_backend.requests import InvalidRequestError
from paceline_backend.requests.asking import Asker
from paceline_backend.store import Store


@dataclass(frozen=True)
class Listing:
    """The logs that nodes have, and why those of others are missing."""

    logs: list[tuple[str, LogFile]]  # with their nodes
    nodes: dict[str, str | None]  # the problem of each that was asked


@dataclass(frozen=True)
class LogText:
    """A part of a log as text."""

    node: str
    attempt: int | None
    offset: int  # of the first byte
    next: int  # offset of what follows
    size: int
    may_grow: bool
    text: str


class Logs:
    """Logs of runs.

    Args:
        store: the database.
        asker: asks nodes.
    """

    def __init__(self, store: Store, asker: Asker) -> None:
        self.store = store
        self._asker = asker

    async def listing(self, run: str, from_attempt: int) -> Listing:
        """All logs, by attempt, rank, output and node; those of launchers first.

        Raises:
            UnknownRunError: no such run.
            ConflictError: no node that may have logs can be asked.
            ProblemError: no such node answers.
            redis.RedisError: the bus is away.
            StoreError: or one of its kinds.
        """
        known = await run_in_threadpool(holders, self.store, run)
        answers = await ask(self.store, self._asker, known, run, ListLogs(from_attempt))
        logs, problems = [], {}
        for holder, answer in zip(known, answers, strict=True):
            problems[holder.node] = str(answer) if isinstance(answer, Exception) else None
            if isinstance(answer, LogList):
                logs += [(holder.node, log) for log in answer.logs]
        if known and all(problems.values()):
            raise refusal(answers)
        logs.sort(key=lambda pair: _place(*pair))
        return Listing(logs, problems)

    async def part(self, run: str, wanted: ReadLog, node: str | None = None) -> LogText:
        """A part of a log.

        Args:
            run: public id.
            wanted: which.
            node: that has it; None: the one that has the rank.

        Raises:
            UnknownRunError: no such run.
            InvalidRequestError: the run has no such node, or several have a launcher's log.
            ConflictError: the node cannot be asked.
            ProblemError: there is no such log, or the node does not answer.
            redis.RedisError: the bus is away.
            StoreError: or one of its kinds.
        """
        known = await run_in_threadpool(
            holders, self.store, run, None if node else wanted.rank, wanted.attempt
        )
        known = _chosen(known, wanted, node)
        answers = await ask(self.store, self._asker, known, run, wanted)
        parts = [
            (holder.node, answer)
            for holder, answer in zip(known, answers, strict=True)
            if isinstance(answer, LogPart)
        ]
        if parts:
            return _as_text(*max(parts, key=lambda pair: pair[1].attempt or 0))
        if any(isinstance(answer, Exception) for answer in answers):
            raise refusal(answers)
        words = missing(known, answers) or f"run {run} has no logs: no node has begun it"
        raise ProblemError(HTTPStatus.NOT_FOUND, words)


def _chosen(known: Sequence[LogHolder], wanted: ReadLog, node: str | None) -> list[LogHolder]:
    names = ", ".join(holder.node for holder in known) or "none"
    if node is not None:
        if chosen := [holder for holder in known if holder.node == node]:
            return chosen
        raise InvalidRequestError("node", f"{node} is not a node of the run; its nodes: {names}")
    if wanted.rank is None and len(known) > 1:
        raise InvalidRequestError("node", f"each node has a launcher's log: give one of {names}")
    return list(known)


def _place(node: str, log: LogFile) -> tuple[bool, int, int, bool, str]:
    rank, attempt = log.rank, log.attempt
    return rank is not None, attempt or 0, rank or 0, log.output == "stderr", node


def _as_text(node: str, part: LogPart) -> LogText:
    """A part without the character that its end cuts, unless nothing more will come of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole = part.offset + len(part.data) >= part.size and not part.may_grow
    text = decoder.decode(part.data, whole)
    kept = len(part.data) - (0 if whole else len(decoder.getstate()[0]))
    following = part.offset + kept
    return LogText(node, part.attempt, part.offset, following, part.size, part.may_grow, text)
