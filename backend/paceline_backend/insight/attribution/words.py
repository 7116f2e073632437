"""What an attribution says, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_backend.insight.attribution.model import FEW
from paceline_backend.insight.attribution.verdict import LEAST_SE, Attribution, Worker

_MOST_NAMED = 3  # ranks in a sentence


def words(found: Attribution) -> str:
    """The verdict of all ranks: cause, culprits, who else is slow, and what balancing hides."""
    if len(found.step) < FEW:
        count = len(found.step)
        return f"{count} steps with at least two ranks are too few to tell; {FEW} are needed."
    others = [
        one
        for one in found.workers
        if one.cause in ("node", "transient", "input") and one.rank not in found.ranks
    ]
    sentences = [_VERDICTS[found.cause](found), *map(worker_words, _worst(others))]
    return " ".join(sentences)


def worker_words(one: Worker) -> str:
    """What is to be said of one rank."""
    if one.cause == "node":
        return _node(one)
    if one.cause == "transient":
        return _transient(one)
    if one.cause == "input":
        return (
            f"Rank {one.rank} waits {_time(one.late_s)} a step for its data loader.{_causes(one)}"
        )
    if one.cause == "data":
        return f"Rank {one.rank} holds others up by larger batches.{_causes(one)}"
    if one.factor is None:
        return f"Rank {one.rank} had samples in too few steps to tell its speed."
    if one.factor < 1 / (1 + LEAST_SE):
        return f"Rank {one.rank} computes {1 / one.factor:.2g}× faster than the median."
    return f"Rank {one.rank} is as fast as the others."


def _none(found: Attribution) -> str:
    if found.se < LEAST_SE:
        return f"No straggler now: SE {found.se:.2f}."
    return (
        f"No straggler now: SE {found.se:.2f} is noise; a rank's step varies by "
        f"{100 * found.noise:.0f} % without a pattern."
    )


def _by_node(found: Attribution) -> str:
    if guilty := _guilty(found):
        return " ".join(map(_node, _worst(guilty)))
    fast = [one for one in found.workers if one.factor and one.factor < 1 / (1 + LEAST_SE)]
    if not fast:
        return _spread(found)
    names = _ranks([one.rank for one in fast])
    verbs = "is faster than the others and waits" if len(fast) == 1 else "are faster and wait"
    return f"{names} {verbs}: {_share(found, 'node')} of the SP."


def _spread(found: Attribution) -> str:
    """Many small differences in speed, none of which counts by itself."""
    known = [(one.factor, one.rank) for one in found.workers if one.factor]
    (least, fastest), (most, slowest) = min(known), max(known)
    return (
        f"Ranks differ in speed by {100 * (most / least - 1):.0f} %: rank {slowest} is the "
        f"slowest, rank {fastest} the fastest. That is {_share(found, 'node')} of the SP."
    )


def _by_data(found: Attribution) -> str:
    if found.counted > 0.5:
        text = (
            f"Ranks that are equally fast get different numbers of samples: "
            f"{_share(found, 'data')} of the straggler effect (SE {found.se:.2f})."
        )
    else:
        text = (
            f"Batches differ in size: balancing by size would remove {_share(found, 'data')} of "
            f"the straggler effect (SE {found.se:.2f})."
        )
    if found.ranks:
        text += f" The largest go to {_ranks(found.ranks).lower()}."
    return text


def _by_input(found: Attribution) -> str:
    return " ".join(worker_words(one) for one in _worst(_guilty(found))) or (
        f"Data loaders hold steps up, of all ranks in turn: {_share(found, 'input')} of the SP."
    )


def _by_transient(found: Attribution) -> str:
    guilty = _guilty(found)
    slow = guilty or [one for one in found.workers if one.slow_steps]
    if not guilty or 2 * len(guilty) > len(found.workers):
        return (
            f"{len(slow)} of {len(found.workers)} ranks are slow in passing, in turn: "
            f"{_share(found, 'transient')} of the SP. Something else uses their machines."
        )
    return " ".join(map(_transient, _worst(guilty)))


_VERDICTS = {
    "none": _none,
    "node": _by_node,
    "data": _by_data,
    "input": _by_input,
    "transient": _by_transient,
}


def _node(one: Worker) -> str:
    text = f"Rank {one.rank} computes {one.factor:.2g}× slower than the median at equal load: "
    if one.cut:
        return text + f"a slow machine, whose share of the load was cut.{_causes(one)}"
    return text + f"a slow machine.{_causes(one)}"


def _transient(one: Worker) -> str:
    first, last = one.slow_steps[-1]
    slower = f"{one.slow_factor:.2g}× slower"
    count = sum(end - start + 1 for start, end in one.slow_steps)
    if len(one.slow_steps) > 1:
        state = "now too" if one.slow_now else f"last in step {last}"
        text = f"was {slower} in {count} steps, {len(one.slow_steps)} times, {state}"
    elif one.slow_now:
        text = f"is {slower} since step {first}"
    else:
        text = f"was {slower} in steps {first}–{last} only, and is fine since"
    return f"Rank {one.rank} {text}.{_causes(one)}"


def _causes(one: Worker) -> str:
    return f" It causes {100 * one.caused:.0f} % of the waiting." if one.caused >= 0.01 else ""


def _guilty(found: Attribution) -> list[Worker]:
    return [found.workers[rank] for rank in found.ranks]


def _worst(workers: Sequence[Worker]) -> Sequence[Worker]:
    return sorted(workers, key=lambda one: -max(one.caused, one.hidden))[:_MOST_NAMED]


def _share(found: Attribution, cause: str) -> str:
    return f"{100 * found.shares[cause]:.0f} %"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"Ranks {shown}" + (", …" if len(ranks) > 8 else "")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
