"""Bodies about prices; field names as in docs/rest.md."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from paceline_backend.api import models
from paceline_backend.api.evidence.verdict import Price
from paceline_backend.server.prices import LONGEST_CURRENCY, Per

Since = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class NodePrice(BaseModel):
    """What an hour of a type of node costs, until the type's next price."""

    type: str = Field(examples=["p4d.24xlarge"])
    since: float = Field(description="Unix time from which it holds", examples=[1767225600])
    amount: float = Field(examples=[32.77])
    currency: str = Field(examples=["USD"])
    per: Per = Field(
        description="`node`: of the whole machine, which the ranks of a run there share; "
        "`worker`: of each rank",
        examples=["node"],
    )
    set_at: float = Field(description="Unix time", examples=[1767225605])
    set_by: str = Field(description="as `acknowledged_by` of an alert", examples=["ada"])


class NodePrices(BaseModel):
    """What nodes cost."""

    currency: str | None = Field(description="null: nothing has a price", examples=["USD"])
    default: Price | None = Field(
        description="of a worker's hour on nodes whose type has no price, as "
        "`paceline server --hour-price` says; null: none"
    )
    prices: list[NodePrice] = Field(description="by type; of a type the newest first")
    unpriced: list[str] = Field(
        description="types of listed nodes that have no price of their own now",
        examples=[["g5.xlarge"]],
    )
    untyped: list[str] = Field(
        description="listed nodes whose type is unknown: only the default prices their time",
        examples=[["vm-3"]],
    )


class NewPrice(models.ChangeRequest):
    """What an hour of a type of node costs from a moment on."""

    type: models.NodeType = Field(examples=["p4d.24xlarge"])
    amount: float = Field(description="0 or more", examples=[32.77])
    currency: str = Field(
        description=f"1 to {LONGEST_CURRENCY} letters; that of all other prices", examples=["USD"]
    )
    per: Per = Field(
        default="node",
        description="`node`: of the whole machine; `worker`: of each rank",
        examples=["node"],
    )
    since: Since | None = Field(
        default=None,
        description="Unix time from which it holds; null: now. In place of a price from then on",
        examples=[1767225600],
    )
