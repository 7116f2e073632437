"""Questions of the control plane to a node, and the node's answers.

The control plane opens an answer's stream (`streams.answers`), which goes by itself after a while,
and puts an `Ask` on ``commands(node)``. The node's agent appends an `Answer` to the answer's stream
if that is still there. Both entries carry a MAC with the node's key (`authentic`), and what an
answer holds is sealed (`sealing`): the bus may keep it on its disk.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MOST_BYTES = 262_144  # of a log in an answer
MOST_LOGS = 2_000  # in an answer
MOST_LINES = 10_000
MOST_STACKS = 64  # ranks of a node whose stacks are asked for at once

Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Output = Literal["stdout", "stderr"]


class ListLogs(msgspec.Struct, frozen=True, tag="list_logs"):
    """Which logs of the run are on the node; answered by `LogList`."""

    from_attempt: Whole = 0  # none of the attempts before


class ReadLog(msgspec.Struct, frozen=True, tag="read_log"):
    """A part of a log on the node; answered by `LogPart`."""

    rank: Whole | None  # None: the launcher's, which has neither `output` nor attempts
    output: Output = "stdout"
    attempt: Whole | None = None  # None: the newest in which the rank was on the node
    offset: int = 0  # first byte; below 0: so many bytes before the end
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)] = 65_536  # bytes
    lines: Annotated[int, msgspec.Meta(ge=1, le=MOST_LINES)] | None = None  # the last; no offset


class DumpStacks(msgspec.Struct, frozen=True, tag="dump_stacks"):
    """Ranks shall write their Python stacks; answered by `Dumps` at once, before they have."""

    rank: Whole | None = None  # None: all on the node, at most `MOST_STACKS`


class ReadStacks(msgspec.Struct, frozen=True, tag="read_stacks"):
    """What ranks have written of their stacks; answered by `Stacks`."""

    attempt: Whole  # of a `Dumps`,
    since: list[tuple[Whole, Whole]]  # and of its ranks the offsets


Question = ListLogs | ReadLog | DumpStacks | ReadStacks


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """The control plane asks a node about a run."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # of the answer's stream
    question: Question


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a node says to an `Ask`."""

    sealed: bytes  # a `Reply`, for the control plane


class LogFile(msgspec.Struct, frozen=True, array_like=True):
    """A log on a node."""

    rank: int | None  # None: the launcher's
    output: Output | None
    attempt: int | None
    size: int  # bytes
    modified_at: float  # by the node's clock
    may_grow: bool  # processes that write to it may still run


class LogList(msgspec.Struct, frozen=True, tag="logs"):
    """The logs of a run on a node, those of the newest attempts first; at most `MOST_LOGS`."""

    logs: list[LogFile]


class LogPart(msgspec.Struct, frozen=True, tag="log_part"):
    """A part of a log."""

    attempt: int | None  # None: of the launcher
    offset: int  # of its first byte
    data: bytes
    size: int  # of the log
    may_grow: bool  # processes that write to it may still run


class Dump(msgspec.Struct, frozen=True, array_like=True):
    """A rank that shall write its stacks."""

    rank: int
    offset: int  # where they begin in what it writes
    why: str  # it was not asked; empty: it was


class Dumps(msgspec.Struct, frozen=True, tag="dumps"):
    """The ranks that shall write their stacks."""

    attempt: int
    ranks: list[Dump]


class Stack(msgspec.Struct, frozen=True, array_like=True):
    """A rank's Python stacks."""

    rank: int
    text: str  # of all threads, as faulthandler writes them; of too long a text the end
    frame: str  # the innermost of the user's code: file's name, line and function; empty: none
    why: str  # nothing is written yet; empty: not known


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """What ranks have written of their stacks so far: `MOST_BYTES` characters at most."""

    stacks: list[Stack]


class NotThere(msgspec.Struct, frozen=True, tag="not_there"):
    """The node does not have what was asked for."""

    why: str


Reply = LogList | LogPart | Dumps | Stacks | NotThere
