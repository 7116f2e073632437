"""Whether a run hangs, which ranks wait for which, and what those do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.wire import ENDED, Phase
from paceline_backend.store import Connection
from paceline_backend.store.telemetry import phases
from paceline_backend.store.telemetry.phases import RunPhases

TIMES = 10.0  # A run hangs when nothing has happened for so many times a step's time,
LEAST_S = 30.0  # and for so long.
# Times as long as that if all ranks are in the loop's body, where they may evaluate, too.
BODY_TIMES = 10.0
FRESH_S = 25.0  # Ranks repeat every 10 s what they have been doing for long.
HEARD_S = 20.0  # Where some have told it twice, those that have not told it have nothing to tell.

_MOST_NAMED = 8  # ranks in a sentence
_WAITING = frozenset({Phase.SYNC, Phase.PLAN})
_OUTSIDE = frozenset({Phase.CHECKPOINT, Phase.SCRIPT})
_DOES = {
    Phase.PLAN: "waiting for the plan",
    Phase.DATA: "waiting for its batch",
    Phase.COMPUTE: "in the loop's body",
    Phase.SYNC: "in the reduction of the gradients",
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.SCRIPT: "in the script's own code outside of the loop",
}


@dataclass(frozen=True)
class RankPhase:
    """What a rank has been doing for ten seconds or longer."""

    rank: int = Field(examples=[2])
    step: int = Field(description="that it is in, or its last; -1: none yet", examples=[120])
    phase: Phase = Field(
        description="plan: waits for the plan; data: waits for its batch; compute: in the loop's "
        "body; sync: in the reduction of the gradients; checkpoint: saves one; "
        "script: outside of the loop, or not yet in it",
        examples=["data"],
    )
    since_s: float = Field(description="how long, when it was heard last", examples=[96.0])


@dataclass(frozen=True)
class Hang:
    """What keeps a run from ending its next step."""

    hung: bool = Field(description="ranks wait for what does not come")
    since_s: float = Field(description="0: ranks go on", examples=[95.0])
    expected_s: float | None = Field(
        description="the newest steps' median time; null: no step has ended", examples=[0.4]
    )
    step: int | None = Field(
        description="newest that all ranks have told of: each tells when it begins the next",
        examples=[119],
    )
    phases: list[RankPhase] = Field(description="of ranks that do something for long")
    waiting: list[int] = Field(description="ranks", examples=[[0, 1, 3]])
    holding: list[int] = Field(description="ranks for which they wait", examples=[[2]])
    silent: list[int] = Field(description="those of them that say nothing", examples=[[]])
    words: str = Field(
        description="empty: ranks go on",
        examples=[
            "No step has ended for 95 s; a step takes 0.4 s. Ranks 0, 1 and 3 are in the reduction "
            "of the gradients. They wait for rank 2, which is waiting for its batch."
        ],
    )

    @property
    def scripted(self) -> bool:
        """Whether only the script knows how long it takes: it is left alone.

        No rank waits, or all for which ranks wait save, or are in the script's code outside of a
        loop.
        """
        does = {phase.rank: phase.phase for phase in self.phases}
        held = bool(self.holding) and all(does.get(r) in _OUTSIDE for r in self.holding)
        return held or not self.waiting


def look(connection: Connection, run: int, least_s: float = LEAST_S) -> Hang:
    """Looks whether a run hangs.

    Args:
        connection: to read from.
        run: key of the run.
        least_s: so long nothing has happened at least.
    """
    return explain(phases.standing(connection, run, FRESH_S), least_s)


def hung_s(connection: Connection, runs: Collection[int]) -> dict[int, float]:
    """For how long runs hang, by key; those that do not are left out.

    Args:
        connection: to read from.
        runs: keys.
    """
    # Few runs have such a rank, and a closer look reads much.
    doubtful = phases.long_since(connection, runs, FRESH_S, LEAST_S)
    looks = {run: look(connection, run) for run in doubtful}
    return {run: hang.since_s for run, hang in looks.items() if hang.hung}


def explain(standing: RunPhases, least_s: float = LEAST_S) -> Hang:
    """Why a run does not go on.

    A rank that does something for long says so from its first loop on, whatever it is. So a rank of
    which nothing is heard any more while others wait has stopped as a whole: its process was
    suspended, or its node is away. A rank of which nothing was heard yet is on its way to its loop.

    Ranks that save a checkpoint wait for each other, and so for each rank that does not save.

    What ranks wait for in the loop's body, such as a collective of the script's own, is not known.
    All ranks that stay there for very long after steps that did not are said to hang.
    """
    known = [
        RankPhase(phase.rank, phase.step, phase.phase, phase.since_s)
        for _, phase in sorted(standing.phases.items())
    ]
    expected_s = statistics.median(standing.steps_s) if standing.steps_s else None
    since_s = min((phase.since_s for phase in known), default=0.0)
    bound_s = max(least_s, TIMES * (expected_s or 0.0))
    if standing.state in ENDED or since_s < bound_s:
        return Hang(False, 0.0, expected_s, standing.step, known, [], [], [], "")
    unheard = set(range(standing.world)) - standing.phases.keys()
    if unheard and since_s < HEARD_S:
        return Hang(False, 0.0, expected_s, standing.step, known, [], [], [], "")
    silent = sorted(unheard & set(standing.begun))
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
    words = _words(standing, known, waiting, holding, silent, since_s, expected_s)
    if hung and not waiting:
        words += (
            " No rank waits as far as Paceline knows. They may wait for each other in the script's "
            "own code, such as in a collective that not all of them called; their stacks tell."
        )
    return Hang(hung, since_s, expected_s, standing.step, known, waiting, holding, silent, words)


def _words(
    standing: RunPhases,
    known: Sequence[RankPhase],
    waiting: Sequence[int],
    holding: Sequence[int],
    silent: Sequence[int],
    since_s: float,
    expected_s: float | None,
) -> str:
    usual = "" if expected_s is None else f"; a step takes {_seconds(expected_s)}"
    sentences = [f"No step has ended for {_seconds(since_s)}{usual}."]
    named = _names(standing)
    if not waiting:
        sentences += [
            f"{named(ranks)} {_be(ranks)} {_DOES[what]}." for what, ranks in _by_phase(known)
        ]
        return " ".join(sentences)
    who = "They wait" if len(waiting) > 1 else "It waits"
    for what, ranks in _by_phase(known):
        if ranks[0] in waiting:  # and so do all that do the same
            sentences.append(f"{named(ranks)} {_be(ranks)} {_DOES[what]}.")
    for what, ranks in _by_phase(known):
        if ranks[0] not in waiting:
            sentences.append(f"{who} for {named(ranks).lower()}, {_which(ranks)} {_DOES[what]}.")
    if silent:
        sentences.append(
            f"Nothing is heard of {named(silent).lower()}: suspended, or cut off from the bus."
        )
    if not holding:
        sentences.append(
            "All ranks wait: the network between them, or a collective that not all of them "
            "called, holds them up."
        )
    return " ".join(sentences)


def _by_phase(known: Sequence[RankPhase]) -> list[tuple[Phase, list[int]]]:
    return [
        (what, ranks)
        for what in Phase
        if (ranks := [phase.rank for phase in known if phase.phase is what])
    ]


def _names(standing: RunPhases) -> Callable[[Sequence[int]], str]:
    """Names ranks in words, with their nodes where there are several."""
    several = len(set(standing.placement)) > 1

    def named(ranks: Sequence[int]) -> str:
        words = [
            f"{rank} ({standing.placement[rank]})" if several else str(rank)
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
