"""Bodies about changes in the audit log. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class RunChange(BaseModel):
    """A change of a run."""

    at: float = Field(description="Unix time", examples=[1767225700.0])
    who: str = Field(description="a token's name, or `auto`", examples=["ada"])
    via: str = Field(description="client program, as it names itself", examples=["cli"])
    action: str = Field(examples=["run.policy"])
    revision: int | None = Field(description="revision of the run after the change", examples=[3])
    why: str = Field(examples=["rank 3 is too slow"])
    details: dict[str, Any] = Field(examples=[{"policy": "chronica"}])


class RunChanges(BaseModel):
    """Changes of a run, newest first."""

    items: list[RunChange]
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


class AuditEntry(RunChange):
    """A change of any kind, of a run or of the control plane."""

    scope: str = Field(
        description="role of the requester; empty: the control plane", examples=["operator"]
    )
    address: str = Field(description="address of the client", examples=["10.0.0.7"])
    run: str | None = Field(examples=["3f9a1c07be52"])
    target: str = Field(
        description="changed object other than the run, such as a token's id", examples=[""]
    )


class AuditPage(BaseModel):
    """Changes, newest first."""

    items: list[AuditEntry]
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])
