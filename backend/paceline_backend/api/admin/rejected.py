"""REST: rejected messages, which ingest could not store."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from paceline.wire.bus import connect
from paceline_backend.api.audit import requester_of
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import ADMIN, OPERATOR
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.requests import rejected

router = APIRouter(prefix="/rejected")

# An entry's ID on the bus. The bus refuses numbers of more than 64 bits.
_NUMBER = r"^[0-9]{1,15}-[0-9]{1,15}$"
_REFUSALS = documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE)


class RejectedMessage(BaseModel):
    """A message that ingest could not store."""

    entry: str = Field(examples=["1767225600000-0"])
    run: str | None = Field(description="run that the message names", examples=["3f9a1c07be52"])
    kind: str | None = Field(
        description="type of the message; null: the message is unreadable", examples=["steps"]
    )
    writer: str | None = Field(
        description="only client that may write to the message's stream; null: any client may",
        examples=["run 3f9a1c07be52"],
    )
    reason: str = Field(examples=["run 3f9a1c07be52: rank 4 is out of range: attempt 0 has 4"])
    tries: int = Field(description="attempts to store the message", examples=[1])
    written_at: float = Field(
        description="Unix time at which it was written to the bus", examples=[1767225600.0]
    )
    rejected_at: float = Field(examples=[1767225600.0])


class RejectedMessages(BaseModel):
    """Messages that ingest could not store, newest first."""

    items: list[RejectedMessage]
    kept: int = Field(description="number of messages that can be listed", examples=[2])
    ever: int = Field(description="number of messages ever rejected on this bus", examples=[31])


@router.get(
    "", response_model=RejectedMessages, responses=_REFUSALS, dependencies=[Depends(OPERATOR)]
)
def list_rejected(request: Request, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> Any:
    """List the messages that ingest could not store, newest first."""
    with connect(settings_of(request).bus) as bus:
        kept, ever = rejected.counts(bus)
        return {"items": rejected.newest(bus, limit), "kept": kept, "ever": ever}


@router.delete(
    "/{entry}",
    response_model=RejectedMessage,
    responses={**_REFUSALS, **documented(HTTPStatus.NOT_FOUND)},
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
