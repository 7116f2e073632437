"""Questions of the control plane to a node, and the node's answers.

The control plane creates a stream for the answer (`streams.answers`), which expires after a while,
and puts an `Ask` on ``commands(node)``. The node's agent appends an `Answer` to the answer's stream
if the stream still exists. The entries of questions and answers carry a MAC made with the node's
key (`codec`). The content of an answer is encrypted (`sealing`), because the bus may write it to
its disk.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# Maximum number of bytes of a log in one answer.
MOST_LOG_BYTES = 262_144
# Maximum number of logs in one answer.
MOST_LOGS = 2_000
MOST_LINES = 10_000
# Maximum number of ranks of a node whose stacks one question may request.
MOST_STACKS = 64

Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Output = Literal["stdout", "stderr"]


class ListLogs(msgspec.Struct, frozen=True, tag="list_logs"):
    """A request for the list of a run's logs on the node; answered by `LogList`."""

    # Lowest attempt whose logs are listed.
    from_attempt: Whole = 0


class ReadLog(msgspec.Struct, frozen=True, tag="read_log"):
    """A request for a part of a log on the node; answered by `LogPart`."""

    # None: the launcher's log; then `output` and `attempt` are ignored.
    rank: Whole | None
    output: Output = "stdout"
    # None: the newest attempt in which the rank was on the node.
    attempt: Whole | None = None
    # Offset of the first byte. A negative offset counts from the end of the log.
    offset: int = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_LOG_BYTES)] = 65_536  # bytes
    # If given, this many of the log's last lines are returned, and `offset` is ignored.
    lines: Annotated[int, msgspec.Meta(ge=1, le=MOST_LINES)] | None = None


class DumpStacks(msgspec.Struct, frozen=True, tag="dump_stacks"):
    """A request that ranks write their Python stacks.

    The node answers with `Dumps` at once, before the ranks have written.
    """

    # None: all ranks on the node, at most `MOST_STACKS`.
    rank: Whole | None = None


class ReadStacks(msgspec.Struct, frozen=True, tag="read_stacks"):
    """A request for the stacks that ranks have written; answered by `Stacks`."""

    # The attempt in the answer `Dumps`.
    attempt: Whole
    # A pair for each `Dump`: its rank and its offset.
    since: list[tuple[Whole, Whole]]


Question = ListLogs | ReadLog | DumpStacks | ReadStacks


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question of the control plane to a node about a run."""

    # The id of the answer's stream.
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    question: Question


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A node's answer to an `Ask`."""

    # A `Reply`, encrypted for the control plane.
    sealed: bytes


class LogFile(msgspec.Struct, frozen=True, array_like=True):
    """A log on a node."""

    # None: the launcher's log.
    rank: int | None
    output: Output | None
    attempt: int | None
    size: int  # bytes
    # Unix time of the node's clock.
    modified_at: float
    # True while processes that write to the log may still run.
    may_grow: bool


class LogList(msgspec.Struct, frozen=True, tag="logs"):
    """The logs of a run on a node, newest attempts first; at most `MOST_LOGS`."""

    logs: list[LogFile]


class LogPart(msgspec.Struct, frozen=True, tag="log_part"):
    """A part of a log."""

    # None: a log of the launcher.
    attempt: int | None
    # The position of the first byte of `data`.
    offset: int
    data: bytes
    # The size of the whole log in bytes.
    size: int
    # True while processes that write to the log may still run.
    may_grow: bool


class Dump(msgspec.Struct, frozen=True, array_like=True):
    """A rank whose stacks were requested."""

    rank: int
    # The position in the rank's file at which the stacks will begin.
    offset: int
    # Reason why the node could not signal the rank to write its stacks; empty: it did.
    why: str


class Dumps(msgspec.Struct, frozen=True, tag="dumps"):
    """The ranks whose stacks were requested."""

    attempt: int
    ranks: list[Dump]


class StackTrace(msgspec.Struct, frozen=True, array_like=True):
    """A rank's Python stacks."""

    rank: int
    # The stacks of all threads, as `faulthandler` writes them; only the end if the text is too
    # long.
    text: str
    # The innermost frame of the user's code: file name, line and function. Empty: there is none.
    frame: str
    # Why there is no text; empty: there is text, or the reason is unknown.
    why: str


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """The stacks that ranks have written so far: at most `MOST_LOG_BYTES` characters."""

    stacks: list[StackTrace]


class NotThere(msgspec.Struct, frozen=True, tag="not_there"):
    """The node's answer if it does not have the requested log or stacks."""

    why: str


Reply = LogList | LogPart | Dumps | Stacks | NotThere
