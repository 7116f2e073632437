"""A node's answers to questions of the control plane about the node's runs.

The agent answers each question at once, in its only thread, so an answer must not take long.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import redis

from paceline.core.errors import PacelineError
from paceline.node import logs, rundir
from paceline.node.health import stacks
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.wire import Answer, Ask, answers, encode, signed
from paceline.wire.asking import DumpStacks, ListLogs, LogList, NotThere, ReadStacks, Reply
from paceline.wire.sealing import seal_answer

_log = logging.getLogger(__name__)


def answer(link: Link, node: str, data: Path, run: str, ask: Ask) -> bool:
    """Answer a question; return True if the bus has accepted the answer.

    The bus rejects the answer if the control plane no longer waits for it. Without a key in the
    session there is no answer, because the control plane could not verify who sent it.
    """
    key = link.session.key
    if key is None:
        return False
    reply = msgspec.msgpack.encode(_reply(data, run, link.session.control, ask))
    stream = answers(node, ask.id)
    entry = signed(encode(Answer(seal_answer(reply, key)), run), stream, key)

    def append(bus: redis.Redis) -> bool:
        fields: dict[bytes | str, bytes | str] = dict(entry.items())
        try:
            return bus.xadd(stream, fields, nomkstream=True) is not None  # type: ignore[arg-type]
        # The control plane has not granted this node the right to write to the stream yet.
        except redis.exceptions.NoPermissionError as error:
            _log.warning("cannot answer a request for run %s yet: %s", run, error)
            return False

    return bool(link.attempt(append))


def _reply(data: Path, run: str, control: str, ask: Ask) -> Reply:
    try:
        directory = rundir.directory_of(data, run)
        record = rundir.read(directory / "run.json", Record)
        if record is None or record.control != control:
            return NotThere(f"it has no directory for run {run}")
        question = ask.question
        if isinstance(question, ListLogs):
            return LogList(logs.listed(directory, question.from_attempt))
        if isinstance(question, DumpStacks):
            return stacks.dump(directory, run, question.rank)
        if isinstance(question, ReadStacks):
            return stacks.read(directory, question.attempt, question.since)
        return logs.part(directory, question)
    except (OSError, PacelineError, msgspec.DecodeError) as error:
        _log.warning("cannot answer a request for run %s: %s", run, error)
        return NotThere(f"its files of run {run} cannot be read: {error}")
