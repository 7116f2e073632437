"""Detection of hangs: which ranks wait for which other ranks, and the phases of these ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.wire import ENDED, Phase
from paceline_backend.store import Connection
from paceline_backend.store.telemetry import phases
from paceline_backend.store.telemetry.phases import RunPhases

# --- Thresholds of hangs; tests/unit/insight/test_hangs.py checks them.

# A run hangs only if no rank has made progress for this multiple of a step's time, and for
# `least_s` seconds, by default `SHORTEST_HANG_S`.
HANG_STEPS = 10.0  # × a step's time
SHORTEST_HANG_S = 30.0  # seconds
# If all ranks are in the loop's body, they may be running an evaluation. The run then counts as
# hung only after this many times the time without progress that counts as a hang in other phases.
BODY_TIMES = 10.0
# Older reports of a phase are ignored, because ranks report their phase every 10 s.
PHASE_FRESH_S = 25.0  # seconds
# A rank in a long phase reports the phase twice within this time. If a rank reports nothing for
# longer, it has stopped, or has not reached its loop.
HEARD_S = 20.0  # seconds

# Maximum number of ranks that a sentence names.
_MOST_NAMED = 8
_WAITING = frozenset({Phase.SYNC, Phase.PLAN})
_OUTSIDE = frozenset({Phase.CHECKPOINT, Phase.SCRIPT})
_DOES = {
    Phase.PLAN: "waiting for the plan",
    Phase.DATA: "waiting for a batch",
    Phase.COMPUTE: "in the loop's body",
    Phase.SYNC: "in the reduction of the gradients",
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.SCRIPT: "in the script's own code outside of the loop",
}


@dataclass(frozen=True)
class RankPhase:
    """Phase in which a rank has been for ten seconds or longer."""

    rank: int = Field(examples=[2])
    step: int = Field(
        description="current or last step of the rank; -1: it has begun no step", examples=[120]
    )
    phase: Phase = Field(
        description="current phase of the rank. plan: it waits for the plan; data: it waits for "
        "its batch; compute: it is in the loop's body; sync: it reduces the gradients; checkpoint: "
        "it saves a checkpoint; script: it is outside of the loop, or has not reached the loop",
        examples=["data"],
    )
    since_s: float = Field(
        description="seconds for which the rank has been in this phase, at its last report",
        examples=[96.0],
    )


@dataclass(frozen=True)
class Hang:
    """State of a run that may hang: which ranks wait, and for which other ranks."""

    hung: bool = Field(description="true if the run hangs: no rank makes progress")
    since_s: float = Field(
        description="seconds for which no rank has made progress; 0: ranks make progress",
        examples=[95.0],
    )
    expected_s: float | None = Field(
        description="median time of the newest steps, seconds; null: no step has ended",
        examples=[0.4],
    )
    step: int | None = Field(
        description="newest step that all ranks have reported; a rank reports a step when the "
        "rank begins the next step",
        examples=[119],
    )
    phases: list[RankPhase] = Field(
        description="phases of the ranks that have been in their phase for ten seconds or longer"
    )
    waiting: list[int] = Field(description="ranks that wait for other ranks", examples=[[0, 1, 3]])
    holding: list[int] = Field(
        description="ranks for which the ranks in `waiting` wait", examples=[[2]]
    )
    silent: list[int] = Field(
        description="ranks in `holding` that no longer report their phase", examples=[[]]
    )
    words: str = Field(
        description="sentences about the hang; empty: ranks make progress",
        examples=[
            "No step has ended for 95 s; a step takes 0.4 s. Ranks 0, 1 and 3 are in the reduction "
            "of the gradients. They wait for rank 2, which is waiting for a batch."
        ],
    )

    @property
    def scripted(self) -> bool:
        """Return whether the lack of progress may be intended, because the script's code runs.

        True if no rank waits, or if all ranks for which others wait are saving a checkpoint or are
        in the script's code outside of the loop.
        """
        does = {phase.rank: phase.phase for phase in self.phases}
        held = bool(self.holding) and all(does.get(r) in _OUTSIDE for r in self.holding)
        return held or not self.waiting


def look(connection: Connection, run: int, least_s: float = SHORTEST_HANG_S) -> Hang:
    """Return the state of a run. It hangs only after `least_s` seconds without progress."""
    return explain(phases.current(connection, run, PHASE_FRESH_S), least_s)


def hung_s(connection: Connection, runs: Collection[int]) -> dict[int, float]:
    """Return the seconds for which runs have hung, by key; runs that do not hang are left out."""
    # Call `look`, which reads much data, only for the few runs with a rank in a long phase.
    doubtful = phases.long_since(connection, runs, PHASE_FRESH_S, SHORTEST_HANG_S)
    looks = {run: look(connection, run) for run in doubtful}
    return {run: hang.since_s for run, hang in looks.items() if hang.hung}


def explain(seen: RunPhases, least_s: float = SHORTEST_HANG_S) -> Hang:
    """Return whether a run hangs, and which ranks wait for which other ranks.

    From the start of its first loop, a rank reports each phase that takes long. If ranks wait and
    another rank no longer reports, that rank's process is suspended, or its node is unreachable. A
    rank that has never reported has not reached its loop yet.

    Ranks that save a checkpoint wait for each other. So if some ranks save a checkpoint and others
    do not, the ranks that save it wait for the others.

    In the loop's body, ranks may wait for something that is unknown here, such as a collective of
    the script. If all ranks stay in the body for very long, and earlier steps did not take that
    long, the run counts as hung.
    """
    known = [
        RankPhase(phase.rank, phase.step, phase.phase, phase.since_s)
        for _, phase in sorted(seen.phases.items())
    ]
    expected_s = statistics.median(seen.steps_s) if seen.steps_s else None
    since_s = min((phase.since_s for phase in known), default=0.0)
    bound_s = max(least_s, HANG_STEPS * (expected_s or 0.0))
    if seen.state in ENDED or since_s < bound_s:
        return Hang(False, 0.0, expected_s, seen.step, known, [], [], [], "")
    unheard = set(range(seen.world)) - seen.phases.keys()
    if unheard and since_s < HEARD_S:
        return Hang(False, 0.0, expected_s, seen.step, known, [], [], [], "")
    silent = sorted(unheard & set(seen.begun))
    known += [RankPhase(rank, -1, Phase.SCRIPT, since_s) for rank in sorted(unheard - set(silent))]
    known.sort(key=lambda phase: phase.rank)
    does = {phase.phase for phase in known}
    waits = _WAITING
    if silent or does - _WAITING - {Phase.CHECKPOINT}:
        waits |= {Phase.CHECKPOINT}
    waiting = [phase.rank for phase in known if phase.phase in waits]
    holding = sorted({p.rank for p in known} - set(waiting) | set(silent)) if waiting else []
    in_body = does == {Phase.COMPUTE} and expected_s is not None
    hung = bool(waiting) or (in_body and since_s >= BODY_TIMES * bound_s)
    hang = Hang(hung, since_s, expected_s, seen.step, known, waiting, holding, silent, "")
    words = _words(seen, hang)
    if hung and not waiting:
        words += (
            " No rank waits as far as Paceline knows. Ranks may wait for each other in the "
            "script's own code, such as in a collective that not all ranks called; check the "
            "ranks' stacks."
        )
    return replace(hang, words=words)


def _words(seen: RunPhases, hang: Hang) -> str:
    known, waiting, silent = hang.phases, hang.waiting, hang.silent
    usual = "" if hang.expected_s is None else f"; a step takes {_seconds(hang.expected_s)}"
    sentences = [f"No step has ended for {_seconds(hang.since_s)}{usual}."]
    named = _names(seen)
    if not waiting:
        sentences += [
            f"{named(ranks)} {_be(ranks)} {_DOES[what]}." for what, ranks in _by_phase(known)
        ]
        return " ".join(sentences)
    who = "They wait" if len(waiting) > 1 else "It waits"
    for what, ranks in _by_phase(known):
        # Of the ranks in one phase, either all wait or none does.
        if ranks[0] in waiting:
            sentences.append(f"{named(ranks)} {_be(ranks)} {_DOES[what]}.")
    for what, ranks in _by_phase(known):
        if ranks[0] not in waiting:
            sentences.append(f"{who} for {named(ranks).lower()}, {_which(ranks)} {_DOES[what]}.")
    if silent:
        sentences.append(
            f"No reports from {named(silent).lower()}: suspended, or disconnected from the bus."
        )
    if not hang.holding:
        sentences.append(
            "All ranks wait: for the network between them, or in a collective that not all ranks "
            "called."
        )
    return " ".join(sentences)


def _by_phase(known: Sequence[RankPhase]) -> list[tuple[Phase, list[int]]]:
    return [
        (what, ranks)
        for what in Phase
        if (ranks := [phase.rank for phase in known if phase.phase is what])
    ]


def _names(seen: RunPhases) -> Callable[[Sequence[int]], str]:
    several = len(set(seen.placement)) > 1

    def named(ranks: Sequence[int]) -> str:
        words = [
            f"{rank} ({seen.placement[rank]})" if several else str(rank)
            for rank in ranks[:_MOST_NAMED]
        ]
        if len(ranks) > _MOST_NAMED:
            words.append(f"{len(ranks) - _MOST_NAMED} more")
        listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
        return f"Rank{'s' if len(ranks) > 1 else ''} {listed}"

    return named


def _be(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _which(ranks: Sequence[int]) -> str:
    return f"which {_be(ranks)}"


def _seconds(time_s: float) -> str:
    return f"{time_s:.0f} s" if time_s >= 10 else f"{time_s:.2g} s"
