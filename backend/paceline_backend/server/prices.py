"""Price of a worker-hour, which converts time into money.

An invalid price raises `PriceError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.errors import PacelineError

# Bound on the price of an hour, to detect typing errors.
HIGHEST_PRICE = 1e6
LONGEST_CURRENCY = 10


class PriceError(PacelineError):
    """Error: a price is negative or not a number, or its currency is invalid."""


@dataclass(frozen=True)
class Price:
    """Price of one worker-hour.

    `amount` is 0 or more, and less than `HIGHEST_PRICE`. `currency` consists of letters, such as
    EUR.
    """

    amount: float
    currency: str

    def __post_init__(self) -> None:
        # The comparison also refuses NaN.
        if not 0 <= self.amount < HIGHEST_PRICE:
            raise PriceError(
                f"amount is {self.amount}: give 0 or more, and less than {HIGHEST_PRICE:,.0f}"
            )
        if not self.currency.isalpha() or len(self.currency) > LONGEST_CURRENCY:
            raise PriceError(
                f"currency is {self.currency!r}: give 1 to {LONGEST_CURRENCY} letters, such as EUR"
            )

    def of_time(self, seconds: float) -> float:
        """Return the cost of `seconds` of a worker's time."""
        return self.amount * seconds / 3600

    @property
    def text(self) -> str:
        """Return the price in the format of `--hour-price`."""
        return f"{self.amount!r} {self.currency}"

    @classmethod
    def of(cls, text: str | None) -> Price | None:
        """Parse the value of `--hour-price` or of its environment variable: `2.50 EUR`."""
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
            message = f"--hour-price {text}: give an amount and a currency, such as `2.50 EUR`"
            raise PriceError(message) from None
