"""The price of a worker-hour, which turns time into money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.errors import PacelineError

MOST = 1e6  # of an hour: more is a slip of the pen
LONGEST_CURRENCY = 10


class PriceError(PacelineError):
    """What is no price: a negative amount, no number, or no currency."""


@dataclass(frozen=True)
class Price:
    """What an hour of a worker costs.

    Args:
        amount: of money, 0 or more.
        currency: letters, such as EUR.

    Raises:
        PriceError: amount or currency is none.
    """

    amount: float
    currency: str

    def __post_init__(self) -> None:
        if not 0 <= self.amount < MOST:  # neither is NaN
            raise PriceError(f"amount is {self.amount}: give 0 or more, and less than {MOST:,.0f}")
        if not self.currency.isalpha() or len(self.currency) > LONGEST_CURRENCY:
            raise PriceError(
                f"currency is {self.currency!r}: give 1 to {LONGEST_CURRENCY} letters, such as EUR"
            )

    def of_time(self, seconds: float) -> float:
        """Return what so much time of workers costs."""
        return self.amount * seconds / 3600

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
