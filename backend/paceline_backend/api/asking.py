"""Questions to the nodes of a run about its logs and its ranks' stacks, which only nodes have.

`holders` returns the nodes that may have an answer, and `ask` sends these nodes a question. If no
node has answered, `refusal` combines the nodes' errors into one error. `missing` returns the
reasons why nodes do not have what was requested. Functions raise `redis.RedisError` while the bus
is unavailable, and `StoreError` while the database is unavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline.wire.asking import NotThere, Question
from paceline_backend.api.errors import ProblemError
from paceline_backend.requests import ConflictError, sessions
from paceline_backend.requests.asking import Asker, NoAnswerError
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, nodes, runs
from paceline_backend.store.nodes import run_nodes


class AskedNode(BaseModel):
    """A node that was asked for logs or stacks of a run."""

    node: str = Field(examples=["node-1"])
    problem: str | None = Field(
        description="why the node has not given its logs or stacks; null: it has answered",
        examples=[None],
    )


@dataclass(frozen=True)
class LogHolder:
    """A node that may have logs and stacks of a run.

    `alive` is true if the node's agent sends heartbeats, and `signed` if the agent has a session on
    the bus.
    """

    node: str
    alive: bool
    signed: bool


def holders(
    store: Store, run: str, rank: int | None = None, attempt: int | None = None
) -> list[LogHolder]:
    """Return the nodes that may have a log of a run, sorted by name.

    `rank` is the rank that wrote the log, or None for any rank or launcher. `attempt` is the
    attempt in which the log was written, or None for the newest attempt.

    Raises:
        UnknownRunError: no such run.
        ConflictError: the rank has no log of its own.
    """
    row = runs.get(store, run)
    if row["driver"] and rank:
        raise ConflictError(
            f"run {run}: its script starts the ranks itself, so only rank 0 has a log, with the "
            "output of the script and, on Ray, of the workers"
        )
    with store.read() as connection:
        key = runs.key_of(connection, run)
        several = run_nodes.of_runs(connection, [key])[key] if row["nodes_max"] > 1 else []
        known = {node["id"]: node for node in nodes.listed(connection)}
    names = {each.node for each in several} | ({row["node"]} - {None})
    if attempt is None:
        attempt = max((each.attempt for each in several), default=None)
    if rank is not None and len(names) > 1 and attempt is not None and attempt == row["attempt"]:
        placed = _placement(store, key, attempt)
        names = names.intersection(placed[rank : rank + 1]) or names
    return [_holder(name, known.get(name)) for name in sorted(names)]


def _holder(name: str, node: dict[str, Any] | None) -> LogHolder:
    # The node is unknown if a user started `paceline run` on a machine without an agent.
    if node is None:
        return LogHolder(name, alive=False, signed=False)
    return LogHolder(name, alive=node["alive"], signed=node["signed"])


@lru_cache(maxsize=1024)
def _placement(store: Store, key: int, attempt: int) -> tuple[str, ...]:
    """Return each rank's node, from the leader's Hello. Cached, because a Hello is long."""
    with store.read() as connection:
        message = runs.hello(connection, key)
    return () if message is None or message.attempt != attempt else tuple(message.placement)


async def ask(
    store: Store, asker: Asker, known: Sequence[LogHolder], run: str, question: Question
) -> list[object | Exception]:
    """Send a question to nodes. Return, for each node, its answer or an error."""
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
    """Return why nodes do not have what was requested; empty: no node has reported a reason."""
    whys = [
        f"node {holder.node}: {answer.why}"
        for holder, answer in zip(known, answers, strict=True)
        if isinstance(answer, NotThere)
    ]
    return "; ".join(whys)
