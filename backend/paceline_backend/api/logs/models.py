"""Responses about logs. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from paceline.wire import State

Output = Literal["stdout", "stderr"]


class NodeLog(BaseModel):
    """A log on a node."""

    node: str = Field(examples=["node-1"])
    rank: int | None = Field(description="null: the launcher's log", examples=[3])
    output: Output | None = Field(description="null: the launcher's log, which has both")
    attempt: int | None = Field(
        description="null: the launcher's log, which covers all attempts", examples=[0]
    )
    size: int = Field(description="bytes", examples=[4096])
    modified_at: float = Field(
        description="Unix time, by the node's clock", examples=[1767225600.0]
    )
    may_grow: bool = Field(description="processes that write to it may still run", examples=[True])


class AskedNode(BaseModel):
    """A node that may have logs."""

    node: str = Field(examples=["node-1"])
    problem: str | None = Field(
        description="why its logs are missing; null: the node has answered", examples=[None]
    )


class RunLogs(BaseModel):
    """The logs of a run."""

    run: str = Field(examples=["3f9a1c07be52"])
    state: State = Field(description="state of the run", examples=["running"])
    nodes: list[AskedNode]
    logs: list[NodeLog] = Field(
        description="sorted by attempt, rank, output and node; launchers' logs first"
    )


class LogExcerpt(BaseModel):
    """A part of a log."""

    run: str = Field(examples=["3f9a1c07be52"])
    node: str = Field(examples=["node-1"])
    rank: int | None = Field(description="null: the launcher's log", examples=[3])
    output: Output | None = Field(description="null: the launcher's log, which has both")
    attempt: int | None = Field(
        description="null: the launcher's log, which covers all attempts", examples=[0]
    )
    offset: int = Field(description="offset of the first byte", examples=[0])
    next: int = Field(
        description="offset of the next part; below `size`: there is more", examples=[17]
    )
    size: int = Field(description="size of the whole log in bytes", examples=[17])
    may_grow: bool = Field(description="processes that write to it may still run", examples=[True])
    text: str = Field(
        description="invalid UTF-8 is replaced by U+FFFD", examples=["loss 0.31 at 12\n"]
    )
