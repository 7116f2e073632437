"""What a record's fields may hold: it follows from the columns of the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from paceline.wire import RoundRecord, StepRecord
from paceline.wire.segment import MOST_STEPS
from paceline_backend.store import schema
from paceline_backend.store.database import StoreRefusedError
from paceline_backend.store.refusals import HUGE

# COPY in binary cuts integers off without a word, and SQLite takes any of 64 bits.
_BOUNDS: dict[type, int] = {sa.SmallInteger: 2**15, sa.Integer: 2**31, sa.BigInteger: 2**63}

R = TypeVar("R", StepRecord, RoundRecord)


class Columns(Generic[R]):
    """A kind of record and its table: each field is a column of the same name.

    Integers must fit into their columns. Numbers that must be there must be finite and at least 0,
    and their sum below `HUGE`. A number that may be missing is taken as missing if it is infinite
    or NaN.

    Args:
        record: the kind of record.
        table: where records become rows.

    Raises:
        TypeError: a field has no column.
    """

    def __init__(self, record: type[R], table: sa.Table) -> None:
        self.names = record.__struct_fields__
        if missing := [name for name in self.names if name not in table.c]:
            raise TypeError(
                f"{record.__name__}.{missing[0]} has no column: add one of this name to the table "
                f"{table.name} in store/schema.py"
            )
        kinds = {name: type(table.c[name].type) for name in self.names}
        self._whole = [
            (name, MOST_STEPS if name == "step" else _BOUNDS[kind])
            for name, kind in kinds.items()
            if kind in _BOUNDS
        ]
        real = [name for name, kind in kinds.items() if kind is sa.Double]
        self._optional = [name for name in real if table.c[name].nullable]
        needed = [name for name in real if not table.c[name].nullable]
        self._needed = attrgetter(*needed)
        self._fit = _compiled(self._whole, needed, self._optional)
        # A kind of record that decoders make only of what can be stored as it is. Who decodes it
        # asks nothing of it that `checked` asks; what does not fit is decoded as `record`.
        self.fitting: type[R] = _bounded(record, dict(self._whole), needed, self._optional)

    def all_checked(self, records: Sequence[R]) -> Sequence[R]:
        """Records as they can be stored; see `checked`."""
        fitting = self.fitting
        if self._fit(record for record in records if type(record) is not fitting):
            return records
        return [record if type(record) is fitting else self.checked(record) for record in records]

    def checked(self, record: R) -> R:
        """The record as it can be stored.

        Raises:
            StoreRefusedError: it cannot.
        """
        for name, bound in self._whole:
            if not 0 <= getattr(record, name) < bound:
                raise StoreRefusedError(f"{name} is out of range in {record}")
        needed = self._needed(record)
        if not (min(needed) >= 0 and sum(needed) < HUGE):  # the sum notices NaN wherever it is
            raise StoreRefusedError(
                f"numbers must be finite and at least 0, and their sum below {HUGE:g}, in {record}"
            )
        for name in self._optional:
            value = getattr(record, name)
            if value is not None and not -HUGE < value < HUGE:
                record = msgspec.structs.replace(record, **{name: None})
        return record


def _bounded(
    record: type[R], whole: dict[str, int], needed: Sequence[str], optional: Sequence[str]
) -> type[R]:
    """The kind of record with a bound of each number in its type, which msgspec checks in C."""
    bounds: dict[str, Any] = {
        name: Annotated[int, msgspec.Meta(ge=0, le=bound - 1)] for name, bound in whole.items()
    }
    each = HUGE / (2 * len(needed))  # so that their sum, rounded as it may be, is below `HUGE`
    bounds |= dict.fromkeys(needed, Annotated[float, msgspec.Meta(ge=0, lt=each)])
    within = Annotated[float, msgspec.Meta(gt=-HUGE, lt=HUGE)]
    bounds |= dict.fromkeys(optional, within | None)
    fields = [
        (name, bounds.get(name, field.type), field.default)
        if field.default is not msgspec.NODEFAULT
        else (name, bounds.get(name, field.type))
        for name, field in ((field.name, field) for field in msgspec.structs.fields(record))
    ]
    made = msgspec.defstruct(
        record.__name__, fields, bases=(record,), frozen=True, array_like=True, gc=False
    )
    assert issubclass(made, record)
    return made


def _compiled(
    whole: Sequence[tuple[str, int]], needed: Sequence[str], optional: Sequence[str]
) -> Callable[[Iterable[StepRecord | RoundRecord]], bool]:
    """Whether all records are fine as they are, in one expression over the fields of each.

    Ingest asks this of every record: written out, the question takes a quarter of the time of loops
    over the names of the fields.
    """
    terms = [f"0 <= record.{name} < {bound}" for name, bound in whole]
    terms += [f"0 <= record.{name}" for name in needed]  # NaN is not
    terms += [f"{' + '.join(f'record.{name}' for name in needed)} < {HUGE!r}"]
    terms += [
        f"(record.{name} is None or {-HUGE!r} < record.{name} < {HUGE!r})" for name in optional
    ]
    source = (
        "def fit(records):\n"
        "    for record in records:\n"
        f"        if not ({' and '.join(terms)}):\n"
        "            return False\n"
        "    return True\n"
    )
    names: dict[str, Any] = {}
    exec(source, names)
    made: Callable[[Iterable[StepRecord | RoundRecord]], bool] = names["fit"]
    return made


STEPS = Columns(StepRecord, schema.worker_steps)
