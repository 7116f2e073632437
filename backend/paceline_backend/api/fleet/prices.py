"""REST: what nodes cost."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api import models
from paceline_backend.api.audit import requester_of
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.fleet.price_models import NewPrice, NodePrice, NodePrices, Since
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.server.prices import Price, PriceError
from paceline_backend.store import Connection, audit, nodes
from paceline_backend.store.database import now
from paceline_backend.store.fleet import costs, prices

_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_MALFORMED = HTTPStatus.BAD_REQUEST
_MISSING = HTTPStatus.NOT_FOUND
_FIELDS = ("amount", "currency", "per")  # with which messages about them begin

router = APIRouter(prefix="/prices", responses=documented(HTTPStatus.SERVICE_UNAVAILABLE))


@router.get("", response_model=NodePrices, dependencies=[Depends(VIEWER)])
def list_prices(request: Request) -> Any:
    """What an hour of each type of node costs, and since when."""
    with store_of(request).read() as connection:
        return _listed(request, connection)


@router.put(
    "",
    response_model=NodePrice,
    responses=documented(_MALFORMED, _INVALID),
    dependencies=[Depends(OPERATOR)],
)
def set_price(request: Request, body: NewPrice) -> Any:
    """Notes what an hour of a type of node costs from a moment on."""
    by = requester_of(request, body.by, body.why, body.operator)
    try:
        price = Price(body.amount, body.currency, body.per)
        with store_of(request).write() as connection:
            default = settings_of(request).hour_price
            row, new = prices.put(connection, body.type, body.since, price, by.known_as, default)
            details = {name: row[name] for name in ("since", "amount", "currency", "per")}
            if new:
                audit.record(connection, by, "price.set", target=body.type, details=details)
            return row
    except PriceError as error:
        word = str(error).partition(" ")[0]
        errors = [{"field": word if word in _FIELDS else "currency", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors) from error


@router.delete(
    "",
    response_model=NodePrices,
    responses=documented(_MISSING, _INVALID),
    dependencies=[Depends(OPERATOR)],
)
def delete_price(
    request: Request,
    node_type: Annotated[models.NodeType, Query(alias="type", description="of the nodes")],
    since: Annotated[
        Since | None, Query(description="of the price; left out: all prices of the type")
    ] = None,
    by: Annotated[models.Name, Query(description="the program that asks")] = "api",
    why: Annotated[models.Why, Query(description="for the audit log")] = "",
) -> Any:
    """Forgets a price: its time costs what the type's price before says, or the default."""
    asks = requester_of(request, by, why)
    with store_of(request).write() as connection:
        removed = prices.remove(connection, node_type, since)
        if not removed:
            then = "" if since is None else f" from {since:.3f} on"
            raise ProblemError(_MISSING, f"type {node_type!r} has no price{then}: see GET /prices")
        details = {"prices": removed}
        audit.record(connection, asks, "price.delete", target=node_type, details=details)
        return _listed(request, connection)


def _listed(request: Request, connection: Connection) -> dict[str, Any]:
    default = settings_of(request).hour_price
    listed, at = prices.listed(connection), now(connection)
    known = {row["type"] for row in listed if row["since"] <= at}
    there = nodes.listed(connection)
    types = {node["type"] for node in there} - {""}
    return {
        "currency": costs.currency(connection, default),
        "default": None if default is None else vars(default),
        "prices": listed,
        "unpriced": sorted(types - known),
        "untyped": sorted(node["id"] for node in there if not node["type"]),
    }
