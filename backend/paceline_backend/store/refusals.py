"""Find telemetry messages that the database could not store or readers could not use.

Ingest calls these functions before it stores a message. Each function returns the reason to refuse
a message, which begins with the name of a field, or None if the message is valid. Any program that
can write to the bus can send messages, so fields of the right type may have invalid values.
Segments are validated by `Plan.defect`, which the leader also calls.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import refuse_tight, shown
from paceline.core.emulation import Emulation
from paceline.core.terms import MEANS
from paceline.wire import (
    MOST_WHY,
    DataEpoch,
    Evaluation,
    Fallback,
    GpuState,
    Hello,
    HelloPart,
    LongPhase,
    MetricRecord,
    NodeCheck,
    NodeState,
    RunState,
)
from paceline.wire import metrics as wire_metrics
from paceline.wire.defects import of_plain, of_text, of_times, of_whole
from paceline.wire.parts import DIGEST_BYTES, MOST_PARTS, PART_BYTES
from paceline.wire.plan import MOST_STEPS
from paceline.wire.states import REPORTED, State

# Maximum number of ranks. It is limited, because the state of all ranks must fit into memory.
MOST_RANKS = 2**17

# Upper bound of reported numbers. Postgres raises an error if a product, quotient or sum of finite
# numbers overflows a double, so with larger numbers, one rank's invalid report could make the
# transaction of a whole step fail.
HUGE = 1e100

# One more than the greatest integer in columns of 16, 32 and 64 bits.
_SMALL, _INT, _BIG = 2**15, 2**31, 2**63
# Maximum number of characters of a name, because Postgres cannot index keys above 2,704 bytes.
_LONGEST_NAME = 500


def of_hello(hello: Hello) -> str | None:
    """Validate the Hello of a leader."""
    bounds = {
        "attempt": _SMALL,
        "global_batch": _INT,
        "seed": _BIG,
        "lookahead": _INT,
        "epoch": _INT,
        "step": MOST_STEPS,
    }
    if reason := of_whole(hello, bounds) or of_times(hello, ("started_at",)):
        return reason
    if not 1 <= hello.world <= MOST_RANKS:
        return f"world is {hello.world}: it must be 1 to {MOST_RANKS}"
    if hello.global_batch < 1:
        return "global_batch is 0: it must be at least 1"
    if hello.grid < 1 or hello.global_batch % hello.grid:
        return f"grid is {hello.grid}: it must divide global_batch, {hello.global_batch}"
    if not 0 <= hello.length_grid < math.inf:
        return f"length_grid is {hello.length_grid}: it must be at least 0, and finite"
    if hello.loss_mean not in MEANS:
        return f"loss_mean is {hello.loss_mean!r}: it must be 'samples', 'size' or 'ranks'"
    if hello.epochs is not None and not 0 <= hello.epochs < _BIG:
        return f"epochs is {hello.epochs}: it must be at least 0"
    if hello.gradient_bytes is not None and hello.gradient_bytes < 0:
        return f"gradient_bytes is {hello.gradient_bytes}: it must be at least 0"
    reason = (
        _of_budget_alone(hello) or _of_samples(hello) or _of_ranks(hello) or _of_emulated(hello)
    )
    if reason is None and hello.shards is not None:
        return hello.shards.defect(hello.world, len(hello.sizes) // 8)
    return reason


def of_hello_part(part: HelloPart) -> str | None:
    """Validate a part of a Hello on its own."""
    if reason := of_whole(part, {"attempt": _SMALL}):
        return reason
    if len(part.hello) != DIGEST_BYTES:
        return f"hello has {len(part.hello)} bytes: it must be a digest of {DIGEST_BYTES} bytes"
    if not 1 <= part.of <= MOST_PARTS:
        return f"of is {part.of}: a Hello has 1 to {MOST_PARTS} parts"
    if not 0 <= part.number < part.of:
        return f"number is {part.number}: it must be 0 to {part.of - 1}"
    if not 1 <= len(part.data) <= PART_BYTES:
        return f"data has {len(part.data):,} bytes: it must have 1 to {PART_BYTES:,}"
    return None


def _of_samples(hello: Hello) -> str | None:
    if hello.stream:
        given = [name for name in ("sizes", "used", "shards") if getattr(hello, name)]
        return f"{given[0]} is not empty, but the data is a stream" if given else None
    if not hello.sizes or len(hello.sizes) % 8:
        return "sizes is not a sequence of float64, one for each sample"
    sizes = np.frombuffer(hello.sizes, "<f8")
    if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
        return "sizes must contain finite numbers ≥ 0"
    if hello.token_budget is not None and (reason := _of_budget(hello, sizes)):
        return reason
    if len(hello.used) % 4:
        return "used is not a sequence of uint32"
    used = np.frombuffer(hello.used, "<u4")
    if len(used) and int(used.max()) >= len(sizes):
        return f"used contains {used.max()}, but there are only {len(sizes)} samples"
    return None


def _of_budget_alone(hello: Hello) -> str | None:
    if hello.token_budget is None:
        if hello.token_limits:
            return "token_limits is given without token_budget: leave it out"
        if hello.steps_per_epoch is not None:
            return "steps_per_epoch is given without token_budget: leave it out"
        return None
    if hello.stream:
        return "token_budget cannot be combined with a stream: leave it out"
    if hello.drop_last or hello.grid > 1 or hello.limits or hello.shards is not None:
        return "token_budget cannot be combined with drop_last, grid, limits or shards"
    return "token_budget cannot be combined with uneven_steps" if hello.uneven_steps else None


def _of_budget(hello: Hello, sizes: npt.NDArray[np.float64]) -> str | None:
    budget, steps, limits = hello.token_budget, hello.steps_per_epoch, hello.token_limits
    assert budget is not None
    if not 0 < budget < math.inf:
        return f"token_budget is {budget}: it must be above 0, and finite"
    if sizes.max() > budget:
        return f"sizes contains {shown(sizes.max())}, more than token_budget, {shown(budget)}"
    if steps is not None and not 1 <= steps <= len(sizes):
        return f"steps_per_epoch is {steps}: it must be 1 to {len(sizes)}, the number of sizes"
    if len(limits) not in (0, hello.world):
        return f"token_limits has {len(limits)} values for {hello.world} ranks"
    if not all(0 <= limit < math.inf for limit in limits):
        return "token_limits contains a number that is negative or not finite"
    if limits:
        try:
            refuse_tight(np.array(limits), float(sizes.max()), budget)
        except ValueError as error:
            return str(error)
    return None


def _of_ranks(hello: Hello) -> str | None:
    if len(hello.limits) not in (0, hello.world):
        return f"limits has {len(hello.limits)} values for {hello.world} ranks"
    if not all(0 <= limit < _BIG for limit in hello.limits):
        return "limits contains a number that is negative or too large"
    if len(hello.placement) not in (0, hello.world):
        return f"placement has {len(hello.placement)} nodes for {hello.world} ranks"
    if any(len(node) > _LONGEST_NAME for node in hello.placement):
        return f"placement: a node's name has more than {_LONGEST_NAME} characters"
    if len(hello.devices) not in (0, hello.world):
        return f"devices has {len(hello.devices)} values for {hello.world} ranks"
    for device in hello.devices:
        if reason := device.defect():
            return f"devices: {reason}"
    if len(hello.profiles) not in (0, hello.world):
        return f"profiles has {len(hello.profiles)} values for {hello.world} ranks"
    trials = [trial for rank in hello.profiles for trial in rank]
    if not all(0 <= count < _INT and math.isfinite(time_s) for count, time_s in trials):
        return "profiles contains a trial without a valid number of samples and seconds"
    return None


def _of_emulated(hello: Hello) -> str | None:
    if hello.emulated is None:
        return None
    if reason := of_plain(hello.emulated, "emulated"):
        return reason
    try:
        devices = msgspec.convert(hello.emulated, Emulation)
    except msgspec.ValidationError as error:
        return f"emulated: {error}"
    reason = devices.defect(hello.world)
    return reason and f"emulated: {reason}"


def of_fallback(message: Fallback) -> str | None:
    """Validate a report that a segment is all-reduced in spite of its relaxed synchronisation."""
    if reason := of_whole(message, {"attempt": _SMALL, "segment": _BIG}):
        return reason
    if not 0 < len(message.why) <= MOST_WHY:
        return f"why has {len(message.why)} characters: it must have 1 to {MOST_WHY}"
    return of_text(message.why, "why")


def of_long_phase(message: LongPhase) -> str | None:
    """Validate a report that a rank has been in the same phase for a long time."""
    # Step -1 means that the rank has not started its first step.
    if message.step == -1:
        message = msgspec.structs.replace(message, step=0)
    bounds = {"attempt": _SMALL, "rank": MOST_RANKS, "step": MOST_STEPS}
    return of_whole(message, bounds) or of_times(message, ("since_s", "at"))


def of_metrics(record: MetricRecord) -> str | None:
    """Validate a rank's training metrics of a step."""
    bounds = {"attempt": _SMALL, "rank": MOST_RANKS, "step": MOST_STEPS}
    if reason := of_whole(record, bounds) or wire_metrics.of_metrics(record):
        return reason
    return None if record.weight < HUGE else f"weight is {record.weight}: it must be below {HUGE:g}"


def of_evaluation(message: Evaluation) -> str | None:
    """Validate a rank's metrics on held-out data."""
    # Step -1 means that the script evaluated before the first step.
    if message.step == -1:
        message = msgspec.structs.replace(message, step=0)
    bounds = {"attempt": _SMALL, "rank": MOST_RANKS, "step": MOST_STEPS, "epoch": _INT}
    reason = of_whole(message, bounds | {"trained": _BIG}) or of_times(message, ("at",))
    if message.samples is not None and not 0 < message.samples < _BIG:
        reason = reason or f"samples is {message.samples}: it must be at least 1"
    return reason or wire_metrics.of_evaluation(message)


def of_data_epoch(message: DataEpoch) -> str | None:
    """Validate a report about an epoch of a data set that is stored on the nodes."""
    if not 0 < len(message.node) <= _LONGEST_NAME:
        return f"node has {len(message.node)} characters: it must have 1 to {_LONGEST_NAME}"
    bounds = {"attempt": _SMALL, "rank": MOST_RANKS, "epoch": _INT}
    counts = ("planned_bytes", "moved_bytes", "moved", "read_bytes", "read", "waits", "held_bytes")
    return (
        of_whole(message, bounds | dict.fromkeys(counts, _BIG))
        or of_times(message, ("moved_s", "waited_s", "at"))
        or of_text(message.node, "node")
    )


def of_run_state(change: RunState) -> str | None:
    """Validate a state change of a run that a node reports."""
    if change.state not in REPORTED:
        return f"state is {change.state}: a node reports {State.STARTING} or a later state"
    bounds = {"attempt": _INT, "dropped": _BIG, "port": 2**16}
    if len(change.address) > _LONGEST_NAME:
        return f"address has {len(change.address)} characters: it must have at most {_LONGEST_NAME}"
    if reason := of_whole(change, bounds) or of_times(change, ("at",)):
        return reason
    if change.exit_code is not None and not -_INT <= change.exit_code < _INT:
        return f"exit_code is {change.exit_code}: it must be a 32-bit integer"
    return None


def of_node_state(state: NodeState) -> str | None:
    """Validate an agent's heartbeat."""
    if not 0 < len(state.node) <= _LONGEST_NAME:
        return f"node has {len(state.node)} characters: it must have 1 to {_LONGEST_NAME}"
    reason = of_whole(state, {"cores": _INT, "memory_bytes": _BIG}) or of_times(state, ("at",))
    reason = reason or (None if state.check is None else _of_check(state.check))
    return reason or next(filter(None, map(_of_gpu, state.gpu_states)), None)


def _of_gpu(gpu: GpuState) -> str | None:
    names = [name for name in gpu.__struct_fields__ if name != "throttled_by"]
    given = [name for name in names if getattr(gpu, name) is not None]
    reason = of_whole(gpu, {n: _BIG for n in given if n not in ("power_w", "temperature_c")})
    reason = reason or of_times(gpu, ["power_w"] if "power_w" in given else [])
    reason = reason or next(
        filter(None, (of_text(w, "throttled_by") for w in gpu.throttled_by)), None
    )
    return reason and f"gpu_states: {reason}"


def _of_check(check: NodeCheck) -> str | None:
    names = ("compute_gflops", "memory_gbps", *(("disk_mbps",) if check.disk_mbps else ()))
    return (reason := of_times(check, (*names, "at"))) and f"check.{reason}"
