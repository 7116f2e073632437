"""What an hour of a worker, or of a node, costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import PacelineError

Per = Literal["worker", "node"]
MOST = 1e6  # of an hour: more is a slip of the pen
LONGEST_CURRENCY = 10


class PriceError(PacelineError):
    """What is no price: a negative amount, no number, no currency; or another currency."""


@dataclass(frozen=True)
class Price:
    """What an hour costs.

    Args:
        amount: of money, 0 or more.
        currency: letters, such as EUR.
        per: whose hour: a worker's, or a whole node's, which the ranks of a run there share.

    Raises:
        PriceError: amount or currency is none.
    """

    amount: float
    currency: str
    per: Per = "worker"

    def __post_init__(self) -> None:
        if not 0 <= self.amount < MOST:  # neither is NaN
            raise PriceError(f"amount is {self.amount}: give 0 or more, and less than {MOST:,.0f}")
        if not self.currency.isalpha() or len(self.currency) > LONGEST_CURRENCY:
            raise PriceError(
                f"currency is {self.currency!r}: give 1 to {LONGEST_CURRENCY} letters, such as EUR"
            )
        if self.per not in ("worker", "node"):
            raise PriceError(f"per is {self.per!r}: give worker or node")

    @property
    def text(self) -> str:
        """As `--hour-price` takes it."""
        return f"{self.amount!r} {self.currency}"

    @classmethod
    def of(cls, text: str | None) -> Price | None:
        """As the command line and the environment say it: `2.50 EUR`.

        Raises:
            PriceError: it is no amount with a currency.
        """
        if not text:
            return None
        amount, _, currency = text.strip().partition(" ")
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        try:
            return cls(value, currency.strip())
        except PriceError:
            message = f"--hour-price {text}: give an amount and a currency, as `2.50 EUR`"
            raise PriceError(message) from None
