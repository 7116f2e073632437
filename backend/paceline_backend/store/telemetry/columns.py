"""What a record's fields may hold: it follows from the columns of the same names."""

from __future__ import annotations

from operator import attrgetter
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from paceline.wire import RoundRecord, StepRecord
from paceline.wire.segment import MOST_STEPS
from paceline_backend.store.database import StoreRefusedError

# Postgres raises where a product, quotient or sum of finite numbers leaves the range of a double,
# and so would refuse a step of which one rank reported nonsense.
HUGE = 1e100

# COPY in binary cuts integers off without a word, and SQLite takes any of 64 bits.
_BOUNDS: dict[type, int] = {sa.SmallInteger: 2**15, sa.Integer: 2**31, sa.BigInteger: 2**63}

R = TypeVar("R", StepRecord, RoundRecord)


class Columns:
    """A kind of record and its table: each field is a column of the same name.

    Integers must fit into their columns. Numbers that must be there must be finite, and their
    sum below `HUGE`. A number that may be missing is taken as missing if it is infinite or NaN.

    Args:
        record: the kind of record.
        table: where records become rows.

    Raises:
        TypeError: a field has no column.
    """

    def __init__(self, record: type[msgspec.Struct], table: sa.Table) -> None:
        self.names = record.__struct_fields__
        if missing := [name for name in self.names if name not in table.c]:
            raise TypeError(
                f"{record.__name__}.{missing[0]} has no column: add one of this name to the table "
                f"{table.name} in store/schema.py, and a migration"
            )
        kinds = {name: type(table.c[name].type) for name in self.names}
        self._whole = [
            (name, MOST_STEPS if name == "step" else _BOUNDS[kind])
            for name, kind in kinds.items()
            if kind in _BOUNDS
        ]
        real = [name for name, kind in kinds.items() if kind is sa.Double]
        self._optional = [name for name in real if table.c[name].nullable]
        self._needed = attrgetter(*(name for name in real if not table.c[name].nullable))

    def checked(self, record: R) -> R:
        """The record as it can be stored.

        Raises:
            StoreRefusedError: it cannot.
        """
        for name, bound in self._whole:
            if not 0 <= getattr(record, name) < bound:
                raise StoreRefusedError(f"{name} is out of range in {record}")
        if not sum(map(abs, self._needed(record))) < HUGE:
            raise StoreRefusedError(
                f"numbers must be finite, and their sum below {HUGE:g}, in {record}"
            )
        for name in self._optional:
            value = getattr(record, name)
            if value is not None and not -HUGE < value < HUGE:
                record = msgspec.structs.replace(record, **{name: None})
        return record
