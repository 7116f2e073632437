"""An attribution in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_backend.insight.attribution.model import FEW
from paceline_backend.insight.attribution.verdict import LEAST_SE, Attribution, Worker

_MOST_NAMED = 3  # ranks in a sentence


def words(attribution: Attribution) -> str:
    """The verdict over all ranks: cause, ranks behind it, other slow ranks, hidden slowness."""
    if len(attribution.step) < FEW:
        count = len(attribution.step)
        return f"{count} steps with at least two ranks are too few to tell; {FEW} are needed."
    others = [
        worker
        for worker in attribution.workers
        if worker.cause in ("node", "transient", "input") and worker.rank not in attribution.ranks
    ]
    sentences = [_VERDICTS[attribution.cause](attribution), *map(worker_words, _worst(others))]
    return " ".join(sentences)


def worker_words(worker: Worker) -> str:
    """The sentence about one rank."""
    if worker.cause == "node":
        return _node(worker)
    if worker.cause == "transient":
        return _transient(worker)
    if worker.cause == "input":
        late = _time(worker.late_s)
        return f"Rank {worker.rank} waits {late} a step for its data loader.{_causes(worker)}"
    if worker.cause == "data":
        return f"Rank {worker.rank} holds others up by larger batches.{_causes(worker)}"
    if worker.factor is None:
        return f"Rank {worker.rank} had samples in too few steps to tell its speed."
    if worker.factor < 1 / (1 + LEAST_SE):
        return f"Rank {worker.rank} computes {1 / worker.factor:.2g}× faster than the median."
    return f"Rank {worker.rank} is as fast as the others."


def _none(attribution: Attribution) -> str:
    if attribution.se < LEAST_SE:
        return f"No straggler now: SE {attribution.se:.2f}."
    return (
        f"No straggler now: SE {attribution.se:.2f} is noise; a rank's step varies by "
        f"{100 * attribution.noise:.0f} % without a pattern."
    )


def _by_node(attribution: Attribution) -> str:
    if guilty := _guilty(attribution):
        return " ".join(map(_node, _worst(guilty)))
    fast = [
        worker
        for worker in attribution.workers
        if worker.factor and worker.factor < 1 / (1 + LEAST_SE)
    ]
    if not fast:
        return _spread(attribution)
    names = _ranks([worker.rank for worker in fast])
    verbs = "is faster than the others and waits" if len(fast) == 1 else "are faster and wait"
    return f"{names} {verbs}: {_share(attribution, 'node')} of the SP."


def _spread(attribution: Attribution) -> str:
    """Many small differences in speed, each too small to name a rank."""
    known = [(worker.factor, worker.rank) for worker in attribution.workers if worker.factor]
    (least, fastest), (most, slowest) = min(known), max(known)
    return (
        f"Ranks differ in speed by {100 * (most / least - 1):.0f} %: rank {slowest} is the "
        f"slowest, rank {fastest} the fastest. That is {_share(attribution, 'node')} of the SP."
    )


def _by_data(attribution: Attribution) -> str:
    if attribution.counted > 0.5:
        text = (
            f"Ranks that are equally fast get different numbers of samples: "
            f"{_share(attribution, 'data')} of the straggler effect (SE {attribution.se:.2f})."
        )
    else:
        text = (
            f"Batches differ in size: balancing by size would remove "
            f"{_share(attribution, 'data')} of the straggler effect (SE {attribution.se:.2f})."
        )
    if attribution.ranks:
        text += f" The largest go to {_ranks(attribution.ranks).lower()}."
    return text


def _by_input(attribution: Attribution) -> str:
    return " ".join(worker_words(worker) for worker in _worst(_guilty(attribution))) or (
        f"Data loaders hold steps up, of all ranks in turn: "
        f"{_share(attribution, 'input')} of the SP."
    )


def _by_transient(attribution: Attribution) -> str:
    guilty = _guilty(attribution)
    slow = guilty or [worker for worker in attribution.workers if worker.slow_steps]
    if not guilty or 2 * len(guilty) > len(attribution.workers):
        return (
            f"{len(slow)} of {len(attribution.workers)} ranks are slow in passing, in turn: "
            f"{_share(attribution, 'transient')} of the SP. Something else uses their machines."
        )
    return " ".join(map(_transient, _worst(guilty)))


_VERDICTS = {
    "none": _none,
    "node": _by_node,
    "data": _by_data,
    "input": _by_input,
    "transient": _by_transient,
}


def _node(worker: Worker) -> str:
    text = (
        f"Rank {worker.rank} computes {worker.factor:.2g}× slower than the median at equal load: "
    )
    if worker.cut:
        return text + f"a slow machine, whose share of the load was cut.{_causes(worker)}"
    return text + f"a slow machine.{_causes(worker)}"


def _transient(worker: Worker) -> str:
    first, last = worker.slow_steps[-1]
    slower = f"{worker.slow_factor:.2g}× slower"
    count = sum(end - start + 1 for start, end in worker.slow_steps)
    if len(worker.slow_steps) > 1:
        state = "now too" if worker.slow_now else f"last in step {last}"
        text = f"was {slower} in {count} steps, {len(worker.slow_steps)} times, {state}"
    elif worker.slow_now:
        text = f"is {slower} since step {first}"
    else:
        text = f"was {slower} in steps {first}–{last} only, and is fine since"
    return f"Rank {worker.rank} {text}.{_causes(worker)}"


def _causes(worker: Worker) -> str:
    return (
        f" It causes {100 * worker.caused:.0f} % of the waiting." if worker.caused >= 0.01 else ""
    )


def _guilty(attribution: Attribution) -> list[Worker]:
    return [attribution.workers[rank] for rank in attribution.ranks]


def _worst(workers: Sequence[Worker]) -> Sequence[Worker]:
    return sorted(workers, key=lambda worker: -max(worker.caused, worker.hidden))[:_MOST_NAMED]


def _share(attribution: Attribution, cause: str) -> str:
    return f"{100 * attribution.shares[cause]:.0f} %"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"Ranks {shown}" + (", …" if len(ranks) > 8 else "")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
