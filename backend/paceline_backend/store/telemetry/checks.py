"""Validate a message on its own, independently of what is stored."""

from __future__ import annotations

from paceline.wire import (
    Adopted,
    DataEpoch,
    Evaluation,
    Fallback,
    Hello,
    HelloPart,
    LongPhase,
    Message,
    MetricBatch,
    NodeState,
    RoundBatch,
    RoundRecord,
    RunState,
    StepBatch,
)
from paceline.wire.problems import of_times, of_whole
from paceline_backend.store import refusals, schema
from paceline_backend.store.database import StoreRefusedError
from paceline_backend.store.telemetry.columns import STEPS, Columns
from paceline_backend.store.telemetry.rounds import check_staleness

_ROUND = Columns(RoundRecord, schema.rounds)


def problem(message: Message, world: int | None = None, samples: int | None = None) -> str | None:
    """Return why a message cannot be stored; None if the message on its own is valid.

    `write` refuses the same messages, and with them their whole batch, so ingest calls this
    function to reject single messages. `world` and `samples` are those of the message's attempt,
    None if unknown.
    """
    name = type(message).__name__
    match message:
        case Hello():
            reason = refusals.of_hello(message)
        case HelloPart():
            reason = refusals.of_hello_part(message)
        case RunState():
            reason = refusals.of_run_state(message)
        case NodeState():
            reason = refusals.of_node_state(message)
        case Fallback():
            reason = refusals.of_fallback(message)
        case LongPhase():
            reason = refusals.of_long_phase(message)
        case Evaluation():
            reason = refusals.of_evaluation(message)
        case MetricBatch():
            reason = next(filter(None, map(refusals.of_metrics, message.records)), None)
        case DataEpoch():
            reason = refusals.of_data_epoch(message)
        case Adopted():
            reason = of_whole(message, {"attempt": 2**15}) or of_times(message, ("adopted_at",))
            if reason is None and (wrong := message.segment.problem(world, samples)):
                reason = f"segment: {wrong}"
        case StepBatch() | RoundBatch():
            return _of_records(message)
        case _:
            return None
    return None if reason is None else f"{name}.{reason}"


def _of_records(batch: StepBatch | RoundBatch) -> str | None:
    try:
        if isinstance(batch, StepBatch):
            STEPS.all_checked(batch.records)
            return None
        for record in batch.records:
            _ROUND.checked(record)
            check_staleness(record)
    except StoreRefusedError as error:
        return str(error)
    return None
