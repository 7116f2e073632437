"""What is checked while it is decoded is what `Columns.checked` lets through as it is."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire
from paceline.wire import StepBatch, StepRecord, WireError
from paceline_backend.store import StoreRefusedError, telemetry
from paceline_backend.store.telemetry.validation import STEPS
from support.records import record

EDGES = [2**15 - 1, 2**15, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -1, 0]
NUMBERS = [0.0, -0.0, -1e-300, 1e100, 1e99, -1e100, 1e101, math.nan, math.inf, -math.inf, 5e98]

changes = st.dictionaries(
    st.sampled_from(StepRecord.__struct_fields__),
    st.one_of(st.sampled_from(EDGES), st.sampled_from(NUMBERS), st.floats(), st.none()),
    max_size=3,
)


def entry(values: list[object]) -> dict[bytes, bytes]:
    data = msgspec.msgpack.encode({"type": "steps", "records": [values]})
    return {b"v": b"1", b"run": b"r", b"data": data}


def allowed(of: StepRecord) -> StepRecord | None:
    try:
        return STEPS.checked(of)
    except StoreRefusedError:
        return None


@given(changes)
def test_only_what_can_be_stored_as_it_is_needs_no_further_check(
    changed: dict[str, object],
) -> None:
    values = msgspec.structs.asdict(record(3, 1)) | changed
    fields = entry([values[name] for name in StepRecord.__struct_fields__])
    try:
        expected = wire.decode(fields)
    except WireError as error:
        with pytest.raises(WireError, match=r"^not a paceline message") as refused:
            telemetry.decode(fields)
        assert str(refused.value) == str(error)
        return
    run, message = telemetry.decode(fields)
    assert isinstance(message, StepBatch)
    assert (run, wire.encode(message, run)) == ("r", wire.encode(expected[1], "r"))
    [as_sent] = expected[1].records
    [made] = message.records
    if type(made) is STEPS.fitting:
        kept = allowed(as_sent)
        assert kept is not None
        assert msgspec.structs.astuple(kept) == msgspec.structs.astuple(made)
        assert STEPS.all_checked([made]) == [made]


def test_a_usual_record_needs_no_further_check() -> None:
    message = telemetry.decode(wire.encode(StepBatch([record(3, 1)]), "r"))[1]
    assert isinstance(message, StepBatch)
    assert [type(each) for each in message.records] == [STEPS.fitting]


def test_records_that_fit_and_others_are_checked_together() -> None:
    [fits] = telemetry.decode(wire.encode(StepBatch([record(3, 1)]), "r"))[1].records  # type: ignore[union-attr]
    odd = msgspec.structs.replace(record(4, 1), loss=math.nan)
    checked = STEPS.all_checked([fits, odd])
    assert checked[0] is fits
    assert checked[1] == msgspec.structs.replace(odd, loss=None)
    with pytest.raises(StoreRefusedError, match="seq is out of range"):
        STEPS.all_checked([fits, msgspec.structs.replace(odd, seq=-1)])
