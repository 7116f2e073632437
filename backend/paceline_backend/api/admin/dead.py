"""REST: messages that could not be stored, and what may be done about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

import redis
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from paceline.wire.bus import connect
from paceline_backend.api.audit import requester_of
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import ADMIN, OPERATOR
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.requests import dead

router = APIRouter(prefix="/dead")

_NUMBER = r"^[0-9]{1,15}-[0-9]{1,15}$"  # the bus refuses numbers of more than 64 bits
_REFUSALS = documented(
    HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
)

Entry = Annotated[str, Path(pattern=_NUMBER, description="of `GET /dead`")]


class Letter(BaseModel):
    """A message that could not be stored."""

    entry: str = Field(examples=["1767225600000-0"])
    run: str | None = Field(description="that it says it is of", examples=["3f9a1c07be52"])
    kind: str | None = Field(description="of message; null: unreadable", examples=["steps"])
    stream: str = Field(description="that it came from", examples=["paceline:telemetry"])
    writer: str | None = Field(
        description="who may write to that stream; null: anybody", examples=["run 3f9a1c07be52"]
    )
    reason: str = Field(examples=["run 3f9a1c07be52: rank 4 is out of range: attempt 0 has 4"])
    tries: int = Field(description="how often ingest tried to store it", examples=[1])
    first_at: float = Field(description="when it was first put on the bus", examples=[1767225600.0])
    last_at: float = Field(description="when it was last put aside", examples=[1767225600.0])
    bytes: int = Field(examples=[512])
    whole: bool = Field(description="it is kept whole, and can be put back", examples=[True])


class LetterText(Letter):
    """A message that could not be stored, with what it says."""

    message: str = Field(
        description="the message, as far as it can be read; cut where it is long",
        examples=["{'type': 'run_state', 'state': 'sleeping'}"],
    )


class LetterPage(BaseModel):
    """Messages that could not be stored, newest first."""

    items: list[Letter]
    next_cursor: str | None
    kept: int = Field(description="how many there are in all", examples=[2])
    ever: int = Field(description="how many there ever were on this bus", examples=[31])


@router.get("", response_model=LetterPage, responses=_REFUSALS, dependencies=[Depends(OPERATOR)])
def list_letters(
    request: Request,
    run: Annotated[str | None, Query(max_length=200, description="only of this run")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[
        str | None, Query(pattern=_NUMBER, description="`next_cursor` of the page before")
    ] = None,
) -> Any:
    """Messages that could not be stored, newest first."""
    with _bus(request) as bus:
        items, following = dead.page(bus, limit, cursor, run)
        kept, ever = dead.counts(bus)
    listed = [asdict(item) for item in items]
    return {"items": listed, "next_cursor": following, "kept": kept, "ever": ever}


@router.get(
    "/{entry}", response_model=LetterText, responses=_REFUSALS, dependencies=[Depends(OPERATOR)]
)
def get_letter(request: Request, entry: Entry) -> Any:
    """One message that could not be stored, and what it says."""
    with _bus(request) as bus:
        letter, message = dead.get(bus, entry)
    return {**asdict(letter), "message": message}


@router.post(
    "/{entry}/retry",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Letter,
    responses={**_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(ADMIN)],
)
def retry_letter(request: Request, entry: Entry) -> Any:
    """Puts a message back where it came from: ingest tries to store it again."""
    with _bus(request) as bus:
        return asdict(dead.retry(store_of(request), bus, entry, requester_of(request)))


@router.delete(
    "/{entry}", response_model=Letter, responses=_REFUSALS, dependencies=[Depends(ADMIN)]
)
def drop_letter(request: Request, entry: Entry) -> Any:
    """Forgets a message for good."""
    with _bus(request) as bus:
        return asdict(dead.drop(store_of(request), bus, entry, requester_of(request)))


@contextmanager
def _bus(request: Request) -> Iterator[redis.Redis]:
    with connect(settings_of(request).bus) as client:
        try:
            yield client
        except dead.UnknownLetterError as error:
            raise ProblemError(HTTPStatus.NOT_FOUND, str(error)) from error
