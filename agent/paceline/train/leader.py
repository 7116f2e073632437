"""The leader, rank 0: chooses the next segment, puts it before the ranks and announces it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import redis

from paceline.core.cost import features
from paceline.core.ledger import Epoch
from paceline.core.terms import Terms
from paceline.train.parts import Part, left_key, part_key
from paceline.train.sync import stealing
from paceline.wire import (
    ALLREDUCE,
    Adopted,
    Proposal,
    Segment,
    StopTraining,
    WireError,
    control,
    decode,
    pack_indices,
)
from paceline.wire.bus import connect

logger = logging.getLogger(__name__)

GRACE_S = 0.05
MOST_COASTED = 16  # steps at once, for a controller that plans too late: a switch waits for them
_BLOCK_MS = 250
_RETRY_S = 0.5

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_encoder = msgspec.msgpack.Encoder()

_FAREWELL_S = 2.0  # for ranks that may have left the loop with this one, or be waiting for it
_FAREWELL_TO_END_S = 600.0  # for ranks that are still at work and will read how it ends


class Control:
    """What the controller says, read by a background thread that outlives outages of the bus.

    Thread-safe. It reads the stream from its beginning: what was said before this attempt began
    counts too, if it is about this attempt.
    """

    def __init__(self, bus: str, run: str, attempt: int) -> None:
        self._client = connect(bus)
        self._stream = control(run)
        self._attempt = attempt
        self._proposals: dict[int, Proposal] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self.heard = 0  # proposals for this attempt so far,
        self.newest: Proposal | None = None  # the latest of them
        self.stop_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)
        self._thread.start()

    def take(self, seq: int, wait_s: float) -> Proposal | None:
        """The newest proposal for a segment, waiting up to `wait_s`; forgets it and older ones."""
        with self._changed:
            self._changed.wait_for(lambda: seq in self._proposals or self.stop_reason, wait_s)
            found = self._proposals.get(seq)
            self._proposals = {key: p for key, p in self._proposals.items() if key > seq}
            return found

    def close(self) -> None:
        """Ends the thread, waiting for it unless it is stuck in a dead connection."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        last = b"0-0"
        away = False
        while not self._closing.is_set():
            try:
                answer: Any = self._client.xread({self._stream: last}, count=100, block=_BLOCK_MS)
            except redis.RedisError as error:
                if not away:
                    logger.warning("the bus does not answer (%s): training goes on", error)
                away = True
                self._closing.wait(_RETRY_S)
                continue
            if away:
                logger.warning("the bus answers again")
                away = False
            for entry, fields in answer[0][1] if answer else []:
                self._hear(fields)
                last = entry
        self._client.close()

    def _hear(self, fields: dict[bytes, bytes]) -> None:
        try:
            _, message = decode(fields)
        except WireError as error:
            logger.warning("unreadable message from the controller: %s", error)
            return
        with self._changed:
            if isinstance(message, Proposal) and message.attempt == self._attempt:
                self._proposals[message.segment.seq] = self.newest = message
                self.heard += 1
            elif isinstance(message, StopTraining):
                self.stop_reason = message.reason
            self._changed.notify_all()


class Leader:
    """Adopts the controller's proposals, else plans; tells ranks and control plane. For one thread.

    Args:
        terms: of the run.
        world: W.
        sizes: λ, [N].
        store: the ranks' store.
        control: the controller's voice; None without a bus.
        attempt: of the run.
        announce: takes what is adopted; None: nobody listens.
        epoch: where to begin: the epoch's number,
        step: the first step,
        used: and the samples used in that epoch before.
        limits: the most samples of each rank in a step, [W], together at least a global batch;
            empty: there are none.
    """

    def __init__(
        self,
        terms: Terms,
        world: int,
        sizes: Floats,
        store: Store,
        control: Control | None = None,
        *,
        attempt: int = 0,
        announce: Callable[[Adopted], None] | None = None,
        epoch: int = 0,
        step: int = 0,
        used: Ints | None = None,
        limits: Sequence[int] = (),
    ) -> None:
        self._terms = terms
        self._world = world
        self._sizes = sizes
        self._store = store
        self._control = control
        self._attempt = attempt
        self._announce = announce
        self._limits: Ints | None = np.array(limits) if limits else None
        self._epoch = self._begin(epoch, used)
        self._step = step  # the next segment's first
        self._last: Segment | None = None
        self._newest = -1  # segment in the store
        self._heard = 0  # proposals, when the last segment was chosen
        self._coast_steps = terms.coast_steps  # more while a controller's plans come too late
        self._ahead: deque[tuple[int, Ints]] = (
            deque()
        )  # adopted steps, not reached yet, with samples

    def _begin(self, epoch: int, used: Ints | None = None) -> Epoch:
        terms = self._terms
        return Epoch(
            epoch,
            terms.samples,
            terms.seed,
            terms.global_batch,
            terms.drop_last,
            used,
            self._limits,
        )

    @property
    def seq(self) -> int:
        """Number of the next segment."""
        return 0 if self._last is None else self._last.seq + 1

    def advance(self, epoch: int) -> None:
        """Puts the next segment of that epoch, or the order to stop, before the ranks."""
        if epoch != self._epoch.number:
            self._epoch = self._begin(epoch)
            self._ahead.clear()
        segment = self._proposed()
        if self._control is not None and self._control.stop_reason is not None:
            logger.warning("stopping: %s", self._control.stop_reason)
            stop = Part(epoch, self.seq, self._step, [], [], [], [], b"", False, stop=True)
            self._put(self.seq, [stop] * self._world)
            return
        self._adopt(segment or self._coasted())

    def reached(self, step: int) -> None:
        """Training is in `step`: forgets which samples the steps up to it had."""
        while self._ahead and self._ahead[0][0] <= step:
            self._ahead.popleft()

    def used(self, step: int) -> Ints:
        """The samples of the epoch that steps up to and including `step` have used, ascending."""
        self.reached(step)
        planned = [samples for _, samples in self._ahead]
        return np.setdiff1d(self._epoch.used(), np.concatenate([[], *planned]))

    def unread(self) -> bool:
        """Whether a rank that has not left has yet to read its part of the newest segment."""
        check = self._store.check
        return any(
            check([part_key(self._newest, rank)]) and not check([left_key(rank)])
            for rank in range(self._world)
        )

    def wait_for_readers(self, *, at_the_end: bool) -> None:
        """Waits until the others have read how it ends from the store that goes with us.

        Args:
            at_the_end: they are still at work, and will read it.
        """
        began = time.monotonic()
        told = False
        while self.unread():
            waited = time.monotonic() - began
            if waited >= (_FAREWELL_TO_END_S if at_the_end else _FAREWELL_S):
                return
            if waited >= _FAREWELL_S and not told:
                logger.warning("waiting for a rank that has not come to the end of the plan yet")
                told = True
            time.sleep(0.01)

    def _put(self, seq: int, parts: list[Part]) -> None:
        self._newest = seq
        for rank, part in enumerate(parts):
            self._store.set(part_key(seq, rank), _encoder.encode(part))  # type: ignore[arg-type]

    def _proposed(self) -> Segment | None:
        """The controller's newest valid proposal for the next segment."""
        control = self._control
        if control is None:
            return None
        deadline = time.monotonic() + self._patience_s(control)
        try:
            while proposal := control.take(self.seq, deadline - time.monotonic()):
                segment = proposal.segment
                refusal = self._epoch.refusal(segment, self._world)
                if segment.first_step != self._step:
                    refusal = f"it begins at step {segment.first_step}, not {self._step}"
                if refusal is None:
                    self._coast_steps = self._terms.coast_steps
                    return segment
                logger.warning(
                    "segment %d of %s refused: %s", segment.seq, proposal.controller, refusal
                )
            self._consider_lateness(control)
            return None
        finally:
            self._heard = control.heard

    def _consider_lateness(self, control: Control) -> None:
        """Coasts twice as long if a plan came for a segment that is past: so a next is in time.

        Otherwise a policy that plans for longer than coasting lasts would never come into force.
        """
        newest = control.newest
        if newest is not None and control.heard > self._heard and newest.segment.seq < self.seq:
            self._coast_steps = min(2 * self._coast_steps, MOST_COASTED)

    def _patience_s(self, control: Control) -> float:
        """Waits only for a controller that made the last plan or has spoken since: a live one."""
        kept_up = self._last is not None and self._last.source != "coast"
        return GRACE_S if kept_up or control.heard > self._heard else 0.0

    def _coasted(self) -> Segment:
        last = self._last
        started = time.perf_counter()
        shares = list(last.shares) if last is not None else []
        synchroniser = last.synchroniser if last is not None else ALLREDUCE
        # All ranks meet at a segment's end; where else they would not, that should not be often.
        steps = self._coast_steps if synchroniser == ALLREDUCE else MOST_COASTED
        assignments = self._epoch.coast(steps, self._world, self._sizes, shares)
        counts, indices = pack_indices(assignments)
        return Segment(
            seq=self.seq,
            epoch=self._epoch.number,
            first_step=self._step,
            counts=counts,
            indices=indices,
            policy=last.policy if last is not None else "bsp",
            version=last.version if last is not None else 0,
            source="coast",
            epoch_end=self._epoch.over_with(self._epoch.left - len(indices) // 4),
            shares=shares,
            plan_s=time.perf_counter() - started,
            threads=list(last.threads) if last is not None else [],
            synchroniser=synchroniser,
        )

    def _adopt(self, segment: Segment) -> None:
        parts = self._parts(segment)
        if segment.synchroniser.steals:
            sizes = [self._sizes[np.frombuffer(part.indices, "<u4")] for part in parts]
            stealing.put(self._store, parts, sizes)
        self._put(segment.seq, parts)
        indices = np.frombuffer(segment.indices, dtype="<u4").astype(np.int64)
        ends = np.cumsum([sum(row) for row in segment.counts])
        for k, samples in enumerate(np.split(indices, ends[:-1])):
            self._ahead.append((segment.first_step + k, samples))
        self._epoch.use(indices)
        self._step += segment.steps
        self._last = segment
        if self._announce is not None:
            self._announce(Adopted(self._attempt, segment, time.time()))

    def _parts(self, segment: Segment) -> list[Part]:
        """Each rank's part of a segment."""
        counts = np.asarray(segment.counts)  # [steps, W]
        ends = np.cumsum(counts).reshape(counts.shape)
        starts = ends - counts
        flat = np.frombuffer(segment.indices, dtype="<u4")
        of = features(self._sizes[flat], counts)
        share = counts if self._terms.loss_mean == "samples" else of.load
        weights = share / share.sum(axis=1, keepdims=True)
        ett = np.asarray(segment.ett_s)
        return [
            Part(
                epoch=segment.epoch,
                segment=segment.seq,
                first_step=segment.first_step,
                counts=counts[:, rank].tolist(),
                loads=of.load[:, rank].tolist(),
                weights=weights[:, rank].tolist(),
                ett_s=ett[:, rank].tolist() if segment.ett_s else [],
                indices=b"".join(
                    flat[start:end].tobytes()
                    for start, end in zip(starts[:, rank], ends[:, rank], strict=True)
                ),
                epoch_end=segment.epoch_end,
                squares=of.squares[:, rank].tolist(),
                longest=of.longest[:, rank].tolist(),
                threads=segment.threads[rank] if segment.threads else 0,
                synchroniser=segment.synchroniser,
            )
            for rank in range(self._world)
        ]
