"""Description of a verdict in sentences: who, what, since when, its cost, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_backend.insight.verdict.findings import TimeLoss
from paceline_backend.insight.verdict.judge import Verdict
from paceline_backend.insight.verdict.observed import ObservedSteps
from paceline_backend.insight.verdict.thresholds import THRESHOLDS
from paceline_backend.insight.verdict.waits import is_everyone

# If a cause costs less than this share of the wall time, the text says that fixing it alone saves
# nothing.
_NOTHING = 0.005
# A rank whose speed differs by less than this factor is said to be as fast as the others.
_SAME = 1.05
# A sentence lists at most this many ranges of ranks.
_MOST_PIECES = 4
# If the ranks are all ranks of at most this many nodes, a sentence names the nodes instead.
_MOST_NODES = 3
_ALWAYS = " in all steps"
# If the slowdown factors of a cause's ranks differ by less than this factor, the text gives their
# median instead of a range.
_ALIKE_FACTORS = 1.2
_MOST_CAUSES = 3

_LEARNS = "a policy that learns speeds, such as `paceline`, takes load from {it}"
_TO_DO = {
    "transient": "look at what else ran on {its} machine in these steps",
    "periodic": "look for something that runs at this interval on {its} machine: garbage "
    "collection, a cron job, logging",
    "input": "give the loader more workers, or faster storage; no policy helps",
    "between": "look at checkpoints, evaluation, and what the script does after a step",
    "planning": "look at the load of the control plane's machine, and of rank 0's machine",
}
_SESSION = "with a `paceline.Session` in the script, "
_LOSS = "once the script's loss allows uneven batches, "


def words(verdict: Verdict) -> str:
    """Return the verdict over all ranks as text."""
    if verdict.steps < THRESHOLDS.fewest_steps:
        if verdict.seen.compute_s.shape[1] < 2:
            return "A verdict compares ranks; fewer than two ranks have reported a step."
        few = f"{verdict.steps} steps with at least two ranks are too few for a verdict"
        return f"{few}; {THRESHOLDS.fewest_steps} are needed."
    if not verdict.causes:
        if verdict.seen.apart.all():
            return f"No straggler: in these {verdict.steps:,} steps ranks do not wait."
        headline = (
            "No straggler" if verdict.waste <= THRESHOLDS.waiting_share else "No cause stands out"
        )
        waits = f"ranks spend {100 * verdict.waste:.1f} % of their time waiting for each other"
        return f"{headline}: in these {verdict.steps:,} steps {waits}."
    sentences = [cause_words(verdict, cause) for cause in verdict.causes[:_MOST_CAUSES]]
    if len(verdict.causes) > 1:
        sentences.append(f"Together they cost {_cost(verdict, verdict.cost_s)}.")
    return " ".join(sentences)


def cause_words(verdict: Verdict, cause: TimeLoss) -> str:
    """Return a description of one cause: what happens, since when, and its cost."""
    text = _WHAT[cause.kind](verdict, cause)
    if cause.cost_s < _NOTHING * verdict.wall_s:
        return f"{text} Fixing this alone saves nothing: other causes delay the same steps as long."
    return f"{text} That costs {_cost(verdict, cause.cost_s)}."


def what(verdict: Verdict, cause: TimeLoss) -> str:
    """Return a clause about a cause, without its cost: "rank 3 on vm-3 computes 2.7 × slower"."""
    text = _lower(_WHAT[cause.kind](verdict, cause).split(". ")[0].removesuffix("."))
    nodes = verdict.seen.nodes
    theirs = {nodes[rank] for rank in cause.ranks if rank < len(nodes)}
    if len(theirs) != 1 or len(set(nodes)) == 1 or " of " in text:
        return text
    who = _lower(_named(verdict, cause))
    return text.replace(who, f"{who} on {theirs.pop()}", 1)


def rank_words(verdict: Verdict, rank: int, factor: float | None) -> str:
    """Return a sentence or two about one rank; for `factor` see `attribution.Worker`."""
    cause = cause_of(verdict, rank)
    if cause is not None:
        return cause_words(verdict, cause)
    if factor is None:
        return f"Rank {rank} had samples in too few steps to determine its speed."
    if factor > _SAME:
        return f"Rank {rank} computes {_times(factor)} slower, which hardly costs time."
    if factor < 1 / _SAME:
        return f"Rank {rank} computes {1 / factor:.2g}× faster than the median."
    return f"Rank {rank} is as fast as the others."


def cause_of(verdict: Verdict, rank: int) -> TimeLoss | None:
    """Return the first cause that names a rank; None if there is none."""
    return next((cause for cause in verdict.causes if rank in cause.ranks), None)


def began(verdict: Verdict, cause: TimeLoss) -> int | None:
    """Return the step in which a cause started; None if it started before the verdict's range.

    None is also returned for a periodic cause whose first occurrence is at most one period after
    the start of the range, because it may have started before the range.
    """
    if cause.since is None:
        return None
    first = int(verdict.seen.step[0])
    if cause.period is not None and first > 0 and cause.since <= cause.period:
        return None
    return int(verdict.seen.step[cause.since])


def to_do(verdict: Verdict, cause: TimeLoss) -> str:
    """Return advice on how to remove a cause in this run, as a clause without a full stop.

    The text never recommends the policy in force.
    """
    seen = verdict.seen
    its, it = ("its", "it") if len(cause.ranks) == 1 else ("their", "them")
    if cause.kind == "node":
        text = _against_slow_ranks(seen, cause)
    elif cause.kind == "data":
        text = _against_uneven_batches(seen)
    elif cause.kind == "network":
        links = "look at links and switches"
        if seen.on_one_node:
            links = "look at the load of the machine's cores and memory"
        text = f"{links}; with larger batches, or fewer reductions, it costs less"
    else:
        text = _TO_DO[cause.kind]
    return text.format(its=its, it=it)


def _against_slow_ranks(seen: ObservedSteps, cause: TimeLoss) -> str:
    if is_everyone(cause.ranks, seen.compute_s.shape[1]):
        return (
            "look at what changed since then: heat, clocks, other programs, the script itself; no "
            "policy helps where all ranks are slow"
        )
    machine = "look at {its} machine"
    if seen.nodes:
        machine += ", or replace it"
    if seen.on_one_node:
        machine = "look at what else runs on {its} cores and its GPU, as all ranks share a machine"
    if cause.hidden or seen.balances:
        return machine
    return f"{machine}; until then {_first(seen)}{_LEARNS}"


def _first(seen: ObservedSteps) -> str:
    if seen.equal:
        return _LOSS
    return "" if seen.planned else _SESSION


def _against_uneven_batches(seen: ObservedSteps) -> str:
    if seen.balances:
        return (
            f"`{seen.policy}` balances by size already: a larger global batch lets it divide "
            "more evenly; the longest samples cause the rest"
        )
    return f"{_first(seen)}a policy that balances by size, such as `paceline`, removes it"


def named(ranks: Sequence[int], world: int, nodes: Sequence[str] = ()) -> str:
    """Return a name for a group of ranks, such as "Ranks 512–1023" or "All 8 ranks of b"."""
    if len(ranks) == world > 1:
        return "Every rank"
    if len(ranks) > 1 and len(nodes) == world:
        theirs = sorted({nodes[rank] for rank in ranks})
        whole = sum(node in theirs for node in nodes) == len(ranks)
        if whole and len(theirs) <= _MOST_NODES and len(set(nodes)) > 1:
            return f"All {len(ranks)} ranks of {_listed(theirs)}"
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1] = [pieces[-1][0], rank]
        else:
            pieces.append([rank])
    shown: list[str] = []
    for piece in pieces[:_MOST_PIECES]:
        is_range = piece[-1] > piece[0] + 1
        shown += [f"{piece[0]}–{piece[-1]}"] if is_range else map(str, piece)
    left = len(ranks) - sum(piece[-1] - piece[0] + 1 for piece in pieces[:_MOST_PIECES])
    if left:
        shown.append(f"{left} others")
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {_listed(shown)}"


def _named(verdict: Verdict, cause: TimeLoss) -> str:
    return named(cause.ranks, verdict.seen.compute_s.shape[1], verdict.seen.nodes)


def _node(verdict: Verdict, cause: TimeLoss) -> str:
    who, verb = _named(verdict, cause), "computes" if _is_one(verdict, cause) else "compute"
    if cause.trend is not None:
        before, now = cause.trend
        text = (
            f"{who} {verb} slower and slower{_since(verdict, cause)}: {_times(before)} the usual "
            f"time then, {_times(now)} now."
        )
    else:
        text = f"{who} {verb} {_slower(cause)} slower{_since(verdict, cause)}."
    if cause.hidden_since is not None and not verdict.seen.settles:
        since = "The"
        if cause.hidden_since > (cause.since or 0):
            since = f"Since step {_step(verdict, cause.hidden_since)} the"
        waste = verdict.waste_since(cause.hidden_since)
        waits = "so nobody waits; the others do that work."
        if waste > THRESHOLDS.waiting_share:
            waits = (
                "and the others do that work; all the same, ranks spend "
                f"{100 * waste:.0f} % of their time since then waiting for each other."
            )
        text += f" {since} plan gives less to do there, {waits}"
    return text


def _transient(verdict: Verdict, cause: TimeLoss) -> str:
    who, single = _named(verdict, cause), _is_one(verdict, cause)
    was, slower = "was" if single else "were", f"{_slower(cause)} slower"
    if cause.times > 1:
        last = "now too" if cause.until is None else f"last in step {_step(verdict, cause.until)}"
        return f"{who} {was} {slower} {cause.times} times{_since(verdict, cause)}, {last}."
    if cause.until is None:
        return f"{who} {'is' if single else 'are'} {slower}{_since(verdict, cause)}."
    first = verdict.seen.step[cause.since or 0]
    last_step = _step(verdict, cause.until)
    steps = f"step {first:,}" if last_step == f"{first:,}" else f"steps {first:,}–{last_step}"
    return f"{who} {was} {slower} in {steps} only, and {'is' if single else 'are'} fine since."


def _periodic(verdict: Verdict, cause: TimeLoss) -> str:
    who, single = _named(verdict, cause), _is_one(verdict, cause)
    over = "" if cause.until is None else f", last in step {_step(verdict, cause.until)}"
    return (
        f"{who} {'is' if single else 'are'} {_slower(cause)} slower every {cause.period} "
        f"steps{_since(verdict, cause)}{over}."
    )


def _input(verdict: Verdict, cause: TimeLoss) -> str:
    if not cause.ranks:
        return "Data loaders of different ranks delay steps in turn."
    who, verb = _named(verdict, cause), "waits" if _is_one(verdict, cause) else "wait"
    return f"{who} {verb} for the data loader{_course(verdict, cause)}."


def _data(verdict: Verdict, cause: TimeLoss) -> str:
    course = _course(verdict, cause)
    text = f"Batches of the same step cost differently{'' if course == _ALWAYS else course}."
    if cause.ranks:
        text += f" The larger ones go to {_lower(_named(verdict, cause))}."
    return text


def _network(verdict: Verdict, cause: TimeLoss) -> str:
    assert cause.effect.reduce_s is not None
    if cause.since is None and cause.until is None and cause.times == 1:
        share = float(cause.effect.reduce_s.sum()) / verdict.wall_s
        return f"Reducing the gradients takes {100 * share:.0f} % of the wall time."
    return f"Reducing the gradients takes longer{_course(verdict, cause)}."


def _between(verdict: Verdict, cause: TimeLoss) -> str:
    course = _course(verdict, cause)
    if course == _ALWAYS:
        return "After each step, no rank computes for a while."
    return f"No rank computes between steps{course}."


def _planning(verdict: Verdict, cause: TimeLoss) -> str:
    return f"Ranks wait for the plan in the first step of segments, {cause.times} times."


_WHAT = {
    "node": _node,
    "transient": _transient,
    "periodic": _periodic,
    "input": _input,
    "data": _data,
    "network": _network,
    "between": _between,
    "planning": _planning,
}


def _course(verdict: Verdict, cause: TimeLoss) -> str:
    since = _since(verdict, cause)
    if cause.period is not None:
        text = f" every {cause.period} steps{since}"
    elif cause.times > 1:
        text = f" {cause.times} times{since}"
    elif cause.until is not None:
        first = verdict.seen.step[cause.since or 0]
        return f" in steps {first:,}–{_step(verdict, cause.until)} only"
    else:
        return since or _ALWAYS
    return text if cause.until is None else f"{text}, last in step {_step(verdict, cause.until)}"


def _since(verdict: Verdict, cause: TimeLoss) -> str:
    step = began(verdict, cause)
    return "" if step is None else f" since step {step:,}"


def _step(verdict: Verdict, at: int) -> str:
    return f"{int(verdict.seen.step[at]):,}"


def _is_one(verdict: Verdict, cause: TimeLoss) -> bool:
    return len(cause.ranks) == 1 or len(cause.ranks) == verdict.seen.compute_s.shape[1]


def _slower(cause: TimeLoss) -> str:
    assert cause.factors is not None
    least, most = cause.factors
    if most < _ALIKE_FACTORS * least:
        return _times(cause.factor or most)
    return f"{_times(least)[:-2]} to {_times(most)}"


def _times(factor: float) -> str:
    if factor < 1.95:
        return f"{factor:.2f} ×"
    return f"{factor:.2g} ×" if factor < 10 else f"{factor:,.0f} ×"


def _cost(verdict: Verdict, seconds: float) -> str:
    share = f"{100 * seconds / verdict.wall_s:.0f} % of the wall time"
    return f"{share}: {_time(seconds)} in {verdict.steps:,} steps"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
