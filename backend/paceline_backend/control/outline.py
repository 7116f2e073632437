"""The outline of a run that no controller plans, for its live stream.

The outline of a run of 10,000 ranks is a ten-thousandth of it.
"""

from __future__ import annotations

import msgspec

from paceline.wire import Adopted, Message, StepBatch


def of(message: Message) -> Message | None:
    """A message without what is each rank's own; None: it has nothing of the kind."""
    if isinstance(message, StepBatch):
        of_steps = {record.step: record for record in message.records}
        return StepBatch([*of_steps.values()])
    if isinstance(message, Adopted):
        segment = msgspec.structs.replace(
            message.segment,
            counts=[[] for _ in message.segment.counts],
            indices=b"",
            ett_s=[],
            shares=[],
            memory={},
        )
        return msgspec.structs.replace(message, segment=segment)
    return None
