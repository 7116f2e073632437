"""Bodies about nodes. `docs/rest.md` describes the fields."""

from __future__ import annotations

from pydantic import BaseModel, Field

from paceline.wire import State
from paceline_backend.api import models


class NewCordon(models.In):
    """Request to cordon a node."""

    reason: models.Why = Field(default="", examples=["its disk is slow"])
    by: models.Name = Field(
        default="api", description="client program, for the audit log", examples=["api"]
    )


class NodeRun(BaseModel):
    """A run that a node took part in."""

    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(description="state of the run on this node", examples=["running"])
    launched_at: float = Field(examples=[1767225600.0])
    message: str | None = Field(description="why the run failed there", examples=[None])
    asked_to_leave: bool = Field(examples=[False])
    replaces: str | None = Field(description="node that this node replaced", examples=[None])


class NodeVerdict(BaseModel):
    """A verdict that named a node slow."""

    run: str = Field(examples=["3f9a1c07be52"])
    at: float = Field(description="Unix time", examples=[1767225700.0])
    ended_at: float | None = Field(
        description="null: verdicts still name the node", examples=[None]
    )
    attempt: int = Field(examples=[0])
    step: int = Field(description="newest step when the node was first named", examples=[120])
    factor: float | None = Field(
        description="time of the node's slow ranks ÷ the other nodes', at equal load",
        examples=[3.0],
    )
    words: str = Field(examples=["n2 computes at a third of the others' pace."])


class PastCordon(BaseModel):
    """A cordon of a node, lifted or still active."""

    at: float = Field(description="Unix time", examples=[1767225800.0])
    by: str = Field(description="a token's name", examples=["ada"])
    reason: str = Field(examples=["its disk is slow"])
    lifted_at: float | None = Field(description="null: still cordoned", examples=[None])
    lifted_by: str | None = Field(examples=[None])
    lifted_why: str | None = Field(examples=[None])


class NodeHistory(BaseModel):
    """History of a node."""

    node: str = Field(examples=["n2"])
    runs: list[NodeRun]
    slow: list[NodeVerdict]
    cordons: list[PastCordon]
