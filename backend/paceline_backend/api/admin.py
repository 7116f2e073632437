"""REST: the server's version and presets, the caller's role, and rejected messages.

Ingest rejects a message that it cannot store. Operators can list the rejected messages with the
reasons, and admins can delete them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from paceline import policies
from paceline.core.version import __version__
from paceline.policies import Changes
from paceline.wire import PROTOCOL_VERSION
from paceline.wire.bus import connect, without_password
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.preconditions import requester_of
from paceline_backend.api.rules import ADMIN, OPERATOR, VIEWER, allow
from paceline_backend.api.state import bus_url, settings_of, store_of
from paceline_backend.requests import rejected

router = APIRouter()
rejected_router = APIRouter(prefix="/rejected")

# Pattern of an entry's ID on the bus. It is limited, because the bus accepts only 64-bit numbers.
_NUMBER = r"^[0-9]{1,15}-[0-9]{1,15}$"
_REJECTED_REFUSALS = documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE)


class Version(BaseModel):
    """Version and identity of this server."""

    version: str = Field(examples=["0.1.0"])
    protocol: int = Field(
        description="version of the protocol of messages on the bus", examples=[1]
    )
    id: str = Field(description="permanent id of the control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(
        description="URL at which agents reach the bus; with the password only for an admin",
        examples=["redis://127.0.0.1:6379/0"],
    )


class Me(BaseModel):
    """The caller."""

    name: str = Field(description="name of the caller in the audit log", examples=["ada"])
    scope: Literal["viewer", "operator", "agent", "admin"] = Field(
        description="role of the caller", examples=["operator"]
    )
    shared: bool = Field(
        description="true: several people may share the caller's token, so the field `operator` of "
        "a change may name the person"
    )


class PolicyInfo(BaseModel):
    """A preset: a policy with a name and parameters."""

    name: str = Field(examples=["chronica"])
    summary: str = Field(examples=["Balances the load of every step by learned speeds"])
    source: str = Field(examples=["CHRONICA (2022)"])
    parameters: dict[str, dict[str, Any]] = Field(
        description="JSON Schema of each parameter, by name",
        examples=[{"window": {"type": "integer", "default": 64}}],
    )
    changes: Changes = Field(
        description="what the preset with default parameters changes in the training, compared "
        "with plain DDP of the same seed. nothing: no change; batches: which samples share a "
        "global batch; training: also which gradients are reduced together, and when",
        examples=["batches"],
    )
    changes_with: dict[str, dict[str, Changes]] = Field(
        description="parameters that can alter `changes`: for each, the enum values that do, with "
        "the resulting `changes`",
        examples=[{"mode": {"free": "batches"}}],
    )


@router.get("/version", dependencies=[Depends(allow("viewer", "agent"))])
def version(request: Request) -> Version:
    """Return Paceline's version, the protocol version, the control plane's ID, and the bus's URL.

    The URL includes the password only for an admin's token.
    """
    bus = bus_url(request, settings_of(request).bus)
    return Version(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        id=request.app.state.control_id,
        bus=bus if identity_of(request).scope == "admin" else without_password(bus),
    )


@router.get("/me", dependencies=[Depends(allow("viewer", "agent"))])
def me(request: Request) -> Me:
    """Return the caller's name and role."""
    identity = identity_of(request)
    return Me(name=identity.name, scope=identity.scope, shared=identity.shared)


@router.get("/policies", dependencies=[Depends(VIEWER)])
def list_policies() -> list[PolicyInfo]:
    """List all registered presets."""
    return [_policy_info(policies.get(name)) for name in policies.names()]


def _policy_info(preset: policies.Preset[Any]) -> PolicyInfo:
    changes = policies.make(preset.name).changes
    changes_with: dict[str, dict[str, policies.Changes]] = {}
    schemas = policies.properties(preset.parameters)
    for parameter, schema in schemas.items():
        for value in schema.get("enum", ()):
            with_value = policies.make(preset.name, {parameter: value}).changes
            if with_value != changes:
                changes_with.setdefault(parameter, {})[str(value)] = with_value
    return PolicyInfo(
        name=preset.name,
        summary=preset.summary,
        source=preset.source,
        parameters={name: dict(schema) for name, schema in schemas.items()},
        changes=changes,
        changes_with=changes_with,
    )


class RejectedMessage(BaseModel):
    """A message that ingest could not store."""

    entry: str = Field(examples=["1767225600000-0"])
    run: str | None = Field(
        description="run that the message names; null: it names none", examples=["3f9a1c07be52"]
    )
    kind: str | None = Field(
        description="type of the message; null: the message cannot be decoded", examples=["steps"]
    )
    writer: str | None = Field(
        description="only client that may write to the message's stream; null: any client may",
        examples=["run 3f9a1c07be52"],
    )
    reason: str = Field(examples=["run 3f9a1c07be52: rank 4 is out of range: attempt 0 has 4"])
    tries: int = Field(description="number of attempts to store the message", examples=[1])
    written_at: float = Field(
        description="Unix time at which the message was written to the bus",
        examples=[1767225600.0],
    )
    rejected_at: float = Field(examples=[1767225600.0])


class RejectedMessages(BaseModel):
    """Messages that ingest could not store, newest first."""

    items: list[RejectedMessage]
    kept: int = Field(description="number of rejected messages that can be listed", examples=[2])
    ever: int = Field(
        description="number of messages that were ever rejected on this bus", examples=[31]
    )


@rejected_router.get(
    "",
    response_model=RejectedMessages,
    responses=_REJECTED_REFUSALS,
    dependencies=[Depends(OPERATOR)],
)
def list_rejected(request: Request, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> Any:
    """List the messages that ingest could not store, newest first."""
    with connect(settings_of(request).bus) as bus:
        kept, ever = rejected.counts(bus)
        return {"items": rejected.newest(bus, limit), "kept": kept, "ever": ever}


@rejected_router.delete(
    "/{entry}",
    response_model=RejectedMessage,
    responses={**_REJECTED_REFUSALS, **documented(HTTPStatus.NOT_FOUND)},
    dependencies=[Depends(ADMIN)],
)
def drop_rejected(
    request: Request,
    entry: Annotated[
        str, Path(pattern=_NUMBER, description="`entry` of a message in `GET /rejected`")
    ],
) -> Any:
    """Delete a rejected message."""
    with connect(settings_of(request).bus) as bus:
        try:
            return rejected.drop(store_of(request), bus, entry, requester_of(request))
        except rejected.UnknownMessageError as error:
            raise ProblemError(HTTPStatus.NOT_FOUND, str(error)) from error
