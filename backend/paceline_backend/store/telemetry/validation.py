"""Validate messages before they are stored: each field must fit the column that it is stored in.

Steps are most of the traffic, so `decode` validates them while msgspec decodes them, in C.
`defect` validates any single message, so that ingest can reject it without rejecting its whole
batch. Both use `Columns`, which compares the fields of a record with the table columns of the same
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from paceline import wire
from paceline.wire.defects import of_times, of_whole
from paceline.wire.plan import MOST_STEPS
from paceline_backend.store import refusals, schema
from paceline_backend.store.database import StoreRefusedError
from paceline_backend.store.refusals import HUGE

# Integers must be below these bounds, by the type of their column. The database does not check
# them: binary COPY truncates integers silently, and SQLite accepts any integer of 64 bits.
_BOUNDS: dict[type, int] = {sa.SmallInteger: 2**15, sa.Integer: 2**31, sa.BigInteger: 2**63}

R = TypeVar("R", wire.StepRecord, wire.RoundRecord)


class Columns(Generic[R]):
    """Validator of a kind of record. Each field is stored in the column of the same name.

    Integers must fit into their columns. Required numbers must be finite and at least 0, and their
    sum below `HUGE`. An optional number counts as missing if it is infinite or NaN.

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
        # A subtype that msgspec decodes only from values that can be stored unchanged. Records of
        # this type need no check by `checked`; other records are decoded as `record`.
        self.fitting: type[R] = _bounded(record, dict(self._whole), needed, self._optional)

    def all_checked(self, records: Sequence[R]) -> Sequence[R]:
        """Return the records in the form in which they can be stored; see `checked`."""
        fitting = self.fitting
        if self._fit(record for record in records if type(record) is not fitting):
            return records
        return [record if type(record) is fitting else self.checked(record) for record in records]

    def checked(self, record: R) -> R:
        """Return the record in the form in which it can be stored.

        Raises:
            StoreRefusedError: the record cannot be stored in any form.
        """
        for name, bound in self._whole:
            if not 0 <= getattr(record, name) < bound:
                raise StoreRefusedError(f"{name} is out of range in {record}")
        needed = self._needed(record)
        # The sum is NaN if any of the numbers is.
        if not (min(needed) >= 0 and sum(needed) < HUGE):
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
    """Return a subtype of the record whose field types have bounds, which msgspec checks in C."""
    bounds: dict[str, Any] = {
        name: Annotated[int, msgspec.Meta(ge=0, le=bound - 1)] for name, bound in whole.items()
    }
    # Bound of each number, so small that the rounded sum of all numbers is below `HUGE`.
    each = HUGE / (2 * len(needed))
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
) -> Callable[[Iterable[wire.StepRecord | wire.RoundRecord]], bool]:
    """Compile a function that checks records with a single expression over their fields.

    The function returns True if all records can be stored unchanged. Ingest checks every record,
    and this function takes a quarter of the time of loops over field names.
    """
    terms = [f"0 <= record.{name} < {bound}" for name, bound in whole]
    # The comparison is false for NaN.
    terms += [f"0 <= record.{name}" for name in needed]
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
    made: Callable[[Iterable[wire.StepRecord | wire.RoundRecord]], bool] = names["fit"]
    return made


STEPS = Columns(wire.StepRecord, schema.worker_steps)
ROUNDS = Columns(wire.RoundRecord, schema.rounds)


# Decoder for step batches whose records can all be stored unchanged, which is most batches.
_fitting = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        wire.StepBatch.__name__,
        [("records", list[STEPS.fitting])],  # type: ignore[name-defined]
        bases=(wire.StepBatch,),
        frozen=True,
        tag="steps",
    )
)


def decode(fields: dict[bytes, bytes]) -> tuple[str, wire.Message]:
    """Decode an entry like `paceline.wire.decode`, but validate step records while decoding.

    Step records that can be stored unchanged need no further check.

    Raises:
        WireError: another protocol version, or an invalid message.
    """
    return wire.decode(fields, _fitting)


def defect(
    message: wire.Message, world: int | None = None, samples: int | None = None
) -> str | None:
    """Return why a message cannot be stored; None if the message on its own is valid.

    `world` and `samples` are the number of ranks and of samples in the message's attempt, None if
    unknown.
    """
    name = type(message).__name__
    match message:
        case wire.Hello():
            reason = refusals.of_hello(message)
        case wire.HelloPart():
            reason = refusals.of_hello_part(message)
        case wire.RunState():
            reason = refusals.of_run_state(message)
        case wire.NodeState():
            reason = refusals.of_node_state(message)
        case wire.Fallback():
            reason = refusals.of_fallback(message)
        case wire.LongPhase():
            reason = refusals.of_long_phase(message)
        case wire.Evaluation():
            reason = refusals.of_evaluation(message)
        case wire.MetricBatch():
            reason = next(filter(None, map(refusals.of_metrics, message.records)), None)
        case wire.DataEpoch():
            reason = refusals.of_data_epoch(message)
        case wire.Adopted():
            reason = of_whole(message, {"attempt": 2**15}) or of_times(message, ("adopted_at",))
            if reason is None and (wrong := message.plan.defect(world, samples)):
                reason = f"plan: {wrong}"
        case wire.StepBatch() | wire.RoundBatch():
            return _of_records(message)
        case _:
            return None
    return None if reason is None else f"{name}.{reason}"


def _of_records(batch: wire.StepBatch | wire.RoundBatch) -> str | None:
    try:
        if isinstance(batch, wire.StepBatch):
            STEPS.all_checked(batch.records)
            return None
        for record in batch.records:
            ROUNDS.checked(record)
            check_staleness(record)
    except StoreRefusedError as error:
        return str(error)
    return None


def check_staleness(record: wire.RoundRecord) -> None:
    """Refuse a record whose `staleness` has numbers below 0 or of more than 31 bits."""
    if not all(0 <= count < 2**31 for count in record.staleness):
        raise StoreRefusedError(f"staleness must have numbers from 0 to {2**31 - 1}, in {record}")
