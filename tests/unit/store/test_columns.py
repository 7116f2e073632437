"""Records are checked against the columns that they are stored in."""

from __future__ import annotations

import math

import msgspec
import pytest
import sqlalchemy as sa

from paceline.wire import StepRecord
from paceline_backend.store import StoreRefusedError, schema
from paceline_backend.store.telemetry.validation import Columns
from support.records import record


class Longer(StepRecord, frozen=True, array_like=True):
    """A record with two columns more, as a newcomer adds them."""

    cpu_s: float = 0.0
    hint_s: float | None = None


def table() -> sa.Table:
    columns = [
        *(sa.Column(c.name, c.type, nullable=c.nullable) for c in schema.worker_steps.c),
        sa.Column("cpu_s", sa.Double, nullable=False),
        sa.Column("hint_s", sa.Double),
    ]
    return sa.Table("longer", sa.MetaData(), *columns)


def longer(cpu_s: float, hint_s: float | None = None) -> StepRecord:
    return Longer(*msgspec.structs.astuple(record(0, 0)), cpu_s, hint_s)


def test_a_field_without_a_column_is_named() -> None:
    with pytest.raises(TypeError, match=r"Longer\.cpu_s has no column: add one .* worker_steps"):
        Columns(Longer, schema.worker_steps)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e101])
def test_a_new_column_is_checked_by_its_type(value: float) -> None:
    columns = Columns(Longer, table())
    assert columns.checked(longer(0.5, 0.25)) == longer(0.5, 0.25)
    assert columns.checked(longer(0.5, value)) == longer(0.5, None)
    with pytest.raises(StoreRefusedError, match="numbers must be finite"):
        columns.checked(longer(value))


def test_a_number_below_zero_is_refused_where_it_is_a_time() -> None:
    columns = Columns(Longer, table())
    assert columns.checked(longer(0.0, -0.5)) == longer(0.0, -0.5)
    with pytest.raises(StoreRefusedError, match="at least 0"):
        columns.checked(longer(-1e-9))
