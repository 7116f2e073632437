"""Requests to the nodes of a run, and the reasons why some nodes do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool

from paceline.wire.asking import NotThere, Question
from paceline_backend.api.errors import ProblemError
from paceline_backend.api.logs.holders import LogHolder
from paceline_backend.requests import ConflictError, sessions
from paceline_backend.requests.asking import Asker, NoAnswerError
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store


async def ask(
    store: Store, asker: Asker, known: Sequence[LogHolder], run: str, question: Question
) -> list[object | Exception]:
    """Send a question to nodes. Return each node's answer, or the error why there is none."""
    keys = await run_in_threadpool(sessions.keys, store, [holder.node for holder in known])
    asked = (_ask_one(asker, holder, keys, run, question) for holder in known)
    return list(await asyncio.gather(*asked))


async def _ask_one(
    asker: Asker, holder: LogHolder, keys: Keys, run: str, question: Question
) -> object | Exception:
    node = holder.node
    if not holder.alive:
        return ConflictError(
            f"no agent answers on node {node}: its files of run {run} are in runs/{run} in that "
            "machine's data directory; start an agent there with the same --data to read them"
        )
    if not holder.signed:
        return ConflictError(
            f"the agent of node {node} has no session: start it with --server and a token, "
            "and without a password in --bus"
        )
    try:
        return await asker.ask(node, keys.of_node(node), run, question)
    except NoAnswerError as error:
        return error


def refusal(answers: Sequence[object]) -> Exception:
    """Combine the errors of nodes into one: 504 if a node timed out, else 409."""
    problems = [answer for answer in answers if isinstance(answer, Exception)]
    words = "; ".join(map(str, problems))
    if any(isinstance(problem, NoAnswerError) for problem in problems):
        return ProblemError(HTTPStatus.GATEWAY_TIMEOUT, words)
    return ConflictError(words)


def missing(known: Sequence[LogHolder], answers: Sequence[object]) -> str:
    """Return the reasons why nodes do not have what was requested, in words; empty: none."""
    whys = [
        f"node {holder.node}: {answer.why}"
        for holder, answer in zip(known, answers, strict=True)
        if isinstance(answer, NotThere)
    ]
    return "; ".join(whys)
