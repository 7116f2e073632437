"""Reading of a run's logs on the nodes that store them."""

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
    """Logs that nodes have, and the reasons why logs of other nodes are missing."""

    # Node and log.
    logs: list[tuple[str, LogFile]]
    # Node → its problem; None: the node has answered.
    nodes: dict[str, str | None]


@dataclass(frozen=True)
class LogText:
    """A part of a log as text."""

    node: str
    attempt: int | None
    # Offset of the first byte.
    offset: int  # bytes
    # Offset of the part that follows.
    next: int  # bytes
    # Size of the whole log.
    size: int  # bytes
    may_grow: bool
    text: str


class Logs:
    """Reader of runs' logs."""

    def __init__(self, store: Store, asker: Asker) -> None:
        self.store = store
        self._asker = asker

    async def listing(self, run: str, from_attempt: int) -> Listing:
        """Return all logs, by attempt, rank, output and node; those of launchers come first.

        Raises:
            UnknownRunError: no such run.
            ConflictError: none of the run's nodes can be asked.
            ProblemError: none of the run's nodes answers.
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
        """Return a part of a log. Without `node`, the node of the rank is asked.

        Raises:
            UnknownRunError: no such run.
            InvalidRequestError: the run has no such node, or several nodes have a launcher's log.
            ConflictError: the node cannot be asked.
            ProblemError: there is no such log, or the node does not answer.
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
        words = missing(known, answers) or f"run {run} has no logs: no node has started it"
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
    """Decode a part. A character that the end of the part cuts is left out if more may follow."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole = part.offset + len(part.data) >= part.size and not part.may_grow
    text = decoder.decode(part.data, whole)
    kept = len(part.data) - (0 if whole else len(decoder.getstate()[0]))
    following = part.offset + kept
    return LogText(node, part.attempt, part.offset, following, part.size, part.may_grow, text)
