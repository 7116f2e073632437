"""Checks on a GPU, for tests and `benchmarks/gpu_check.py`: cases on ranks and their answers."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Check

from paceline.node.spool import drain
from paceline.wire import (
    ALLREDUCE,
    Hello,
    RankDevice,
    RoundBatch,
    RoundRecord,
    StepBatch,
    StepRecord,
    decode,
)
from paceline.wire.synchronisation import Synchronisation, convert
from support import gpu_cases
from support.gpu_cases import Copying, Timing, Training
from support.ranks import Ranks

WORLD = 3  # ranks under gloo
WHOLE_S = 450.0  # time for all parts; the rest of 8 minutes is for starting and ending ranks
CASE_S = 40.0  # time for a case and its ranks' start; a case that hangs leaves time for others
LARGE_BYTES = 50 << 20  # smallest model whose copies are timed
TIME = " (time)"  # ends the names of checks that depend on speed

ALL = convert(
    "partial", {"quorum": WORLD, "staleness": 0, "waits": True, "mean": False}
)  # a partial reduction that is an all-reduce
RNA = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
SYNCHRONISERS = {
    "allreduce": ALLREDUCE,
    "rna": RNA,
    "majority": convert("partial", {"probes": 1, "staleness": 4, "mean": False}),
    "n-soft": convert("partial", {"parts": 2, "staleness": 4, "mean": False}),
    "ssp": convert("partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False}),
    "backup": convert("partial", {"spare": 1, "staleness": 0, "waits": True, "mean": False}),
    "flexrr": convert("partial", {"quorum": 1, "staleness": None, "mean": False}),
    "averaging": convert("averaging", {"every": 3}),
    "one-shot averaging": convert("averaging", {"every": None}),
    "pairwise": convert("pairwise"),
    "hierarchical": convert(
        "hierarchical",
        {"groups": [[0, 1], [2]], "every": 2, "probes": 2, "staleness": 4, "mean": True},
    ),
}
QUICK = ("allreduce", "rna", "flexrr", "averaging", "pairwise", "hierarchical")


@dataclass
class Outcome:
    """What a case gave.

    Args:
        answers: what the case returned on each rank.
        steps: the steps that ranks reported.
        rounds: the rounds that ranks reported.
        devices: what each rank said of its device.
    """

    answers: list[Any]
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    devices: list[RankDevice] = field(default_factory=list)


class Kit:
    """Runs cases on ranks that share a device.

    Args:
        kind: "cuda" or "cpu".
        quick: whether cases have fewer steps.
        start: how ranks start, see `Ranks`; None: as the device needs.
    """

    def __init__(
        self, kind: str, *, quick: bool, whole_s: float = WHOLE_S, start: str | None = None
    ) -> None:
        self.kind, self.quick = kind, quick
        backend = "nccl" if kind == "cuda" else "gloo"
        # Forked processes cannot use CUDA once their parent has asked whether there is a GPU.
        start = start or ("spawn" if kind == "cuda" else "forkserver")
        self._pools = {WORLD: Ranks(WORLD, start=start), 1: Ranks(1, backend, start)}
        self._ends_at = time.monotonic() + whole_s
        self._part_ends_at = self._ends_at

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def left_s(self) -> float:
        return self._part_ends_at - time.monotonic()

    def begin(self, limit_s: float) -> None:
        """Begins a part.

        Raises:
            TimeoutError: earlier parts have taken all the time.
        """
        now = time.monotonic()
        self._part_ends_at = min(now + limit_s, self._ends_at)
        if self.left_s <= 0:
            raise TimeoutError("no time is left: the parts before it took too long")

    def run(
        self, case: Callable[..., Any], *args: Any, world: int = WORLD, limit_s: float = CASE_S
    ) -> Outcome:
        """Runs a case on all ranks, with telemetry.

        Args:
            case: called with the kind of device and `args`.
            limit_s: seconds until the ranks are killed; fewer if the part has fewer left.

        Raises:
            RankError: the case raised on a rank, or did not end in time. All ranks are killed.
        """
        with tempfile.TemporaryDirectory() as spool:
            environment = {"PACELINE_RUN": "gpu-check", "PACELINE_SPOOL": spool}
            answers = self._pools[world].run(
                case,
                self.kind,
                *args,
                env=environment,
                timeout_s=max(0.0, min(limit_s, self.left_s)),
            )
            entries: list[dict[bytes, bytes]] = []
            drain(Path(spool), entries.append, include_open=True)
        messages = [decode(entry)[1] for entry in entries]
        return Outcome(
            answers,
            [record for m in messages if isinstance(m, StepBatch) for record in m.records],
            [record for m in messages if isinstance(m, RoundBatch) for record in m.records],
            [device for m in messages if isinstance(m, Hello) for device in m.devices],
        )

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()


Figures = dict[str, Any]
Result = tuple[Figures, list[Check]]
Part = Callable[[Kit], Result]


def in_turn(cases: Mapping[str, Callable[[], Result]]) -> Result:
    """Runs cases by name. A case that fails is a failed check, and the other cases still run."""
    figures: Figures = {}
    checks: list[Check] = []
    for name, case in cases.items():
        ended = False
        made: list[Check] = []
        try:
            figures[name], made = case()
            ended = True
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"}
        checks.append(Check(f"{name}: ended without an error", float(ended), 1, ">="))
        checks += [Check(f"{name}: {c.name}", float(c.value), c.bound, c.op) for c in made]
    return figures, checks


# Timing


def times(kit: Kit, world: int, *, slow_rank: int = -1) -> Result:
    """Compares reported with synchronised compute times; a slowed rank must report longer times."""
    steps = 24 if kit.quick else 80
    # On a GPU of 50 TFLOPS a step computes for a few ms, and the extra work takes about 10 ms.
    hidden, repeats, extra = (1024, 1024, 1000) if kit.cuda else (128, 8, 400)
    work = Timing(steps, hidden, repeats, slow_rank, extra)
    outcome = kit.run(gpu_cases.timed, work, world=world)
    computed_s = {(s.rank, s.step): s.compute_s for s in outcome.steps if s.step >= 4}
    watched = [
        (rank, step, reference_s)
        for rank, answer in enumerate(outcome.answers)
        for step, reference_s in answer.items()
        if (rank, step) in computed_s
    ]
    errors = [abs(computed_s[rank, step] / s - 1) for rank, step, s in watched]
    halves = [_halves(computed_s, rank, steps) for rank in range(world)]
    figures = {
        "median_error": statistics.median(errors),
        "max_error": max(errors),
        "reference_s": statistics.median(s for _, _, s in watched),
        "first_half_s": [first for first, _ in halves],
        "second_half_s": [second for _, second in halves],
    }
    # Ranks that share a device wait for each other's time slices, of about a millisecond, anywhere.
    bound = 0.10 if world == 1 else 0.20
    checks = [Check("median error of compute times" + TIME, figures["median_error"], bound, "<=")]
    checks.append(_all_reported(outcome, steps * world))
    if slow_rank >= 0:
        slower = [second / first for first, second in halves]
        others = [ratio for rank, ratio in enumerate(slower) if rank != slow_rank]
        checks.append(Check("slowed rank's time over before" + TIME, slower[slow_rank], 2.0, ">="))
        checks.append(Check("other ranks' time over before" + TIME, max(others), 1.5, "<="))
    return figures, checks


def _halves(computed_s: dict[tuple[int, int], float], rank: int, steps: int) -> tuple[float, float]:
    """Median compute times of a rank in the first and second half of the steps."""
    of = [(step, seconds) for (who, step), seconds in computed_s.items() if who == rank]
    first = statistics.median(seconds for step, seconds in of if step < steps // 2)
    return first, statistics.median(seconds for step, seconds in of if step >= steps // 2)


def _all_reported(outcome: Outcome, steps: int) -> Check:
    """All steps of all ranks arrive in telemetry, with times that are not negative."""
    right = sum(s.compute_s > 0 and s.sync_s >= 0 and s.step_s > 0 for s in outcome.steps)
    return Check("share of steps reported", right / steps, 1.0, ">=")


def timing(kit: Kit) -> Result:
    """Three ranks under gloo, of which one gets more work."""
    return times(kit, WORLD, slow_rank=1)


def nccl(kit: Kit) -> Result:
    """Times and gradients of a single rank under NCCL."""
    return in_turn(
        {
            "times": partial(times, kit, 1),
            "gradients": partial(_weighted, kit, "samples", [], world=1),
        }
    )


# Gradients


def _weighted(kit: Kit, loss_mean: str, shares: list[float], world: int = WORLD) -> Result:
    outcome = kit.run(gpu_cases.weighted, loss_mean, shares, "sequences", world=world)
    error = max(max(answer["errors"]) for answer in outcome.answers)
    empty = sum(answer["empty"] for answer in outcome.answers)
    checks = [Check("gradients' error", error, 1e-5, "<=")]
    if 0.0 in shares:
        checks.append(Check("empty batches", empty, 1, ">="))
    return {"max_error": error, "empty": empty}, checks


def gradients(kit: Kit) -> Result:
    """Uneven and empty batches beside one process that has the global batch."""
    return in_turn(
        {
            f"mean over {loss_mean}, shares {shares or 'equal'}": partial(
                _weighted, kit, loss_mean, shares
            )
            for loss_mean in ("samples", "size")
            for shares in ([], [0.6, 0.3, 0.1], [0.8, 0.2, 0.0])
        }
    )


def compiled(kit: Kit) -> Result:
    """A model of ``torch.compile`` in a session, if there is a compiler."""
    # Tracing takes each process seconds on a CPU. Without a GPU one rank is enough.
    backend, world = ("inductor", WORLD) if kit.cuda else ("eager", 1)
    shares = [0.6, 0.3, 0.1][:world]
    arguments = "samples", shares, "mlp", backend
    answers = kit.run(gpu_cases.weighted, *arguments, world=world, limit_s=100.0).answers
    if why := next((a["unavailable"] for a in answers if "unavailable" in a), None):
        return {"skipped": why}, []
    error = max(max(answer["errors"]) for answer in answers)
    return {"max_error": error}, [Check("gradients' error, compiled", error, 1e-4, "<=")]


# Synchronisers


def synchronisers(kit: Kit) -> Result:
    """Under each synchroniser replicas end equal, and no gradient is lost or counted twice."""
    names = QUICK if kit.quick else SYNCHRONISERS
    return in_turn({name: partial(_synchroniser, kit, name) for name in names})


def _synchroniser(kit: Kit, name: str) -> Result:
    what = SYNCHRONISERS[name]
    work = Training((what,), epochs=1 if kit.quick else 2)
    outcome = kit.run(gpu_cases.trained, work)
    checks = _trained_well(outcome, work)
    if what.name in ("partial", "hierarchical"):
        checks.append(_conserved(outcome, work))
    if what.name != "allreduce":
        checks.append(Check("rounds", len(outcome.rounds), 1, ">="))
    return _summary(outcome), checks


def _summary(outcome: Outcome) -> Figures:
    rounds = outcome.rounds
    return {
        "step_s": statistics.median(step.step_s for step in outcome.steps),
        "loss": [step.loss for step in outcome.steps if step.loss is not None][-1],
        "rounds": len(rounds),
        "contributors": statistics.fmean([r.contributors for r in rounds] or [0]),
        "dropped": sum(r.dropped for r in rounds),
        "copied_s": statistics.median([r.copied_s for r in rounds] or [0.0]),
        "reduced_s": statistics.median([r.reduced_s for r in rounds] or [0.0]),
    }


def _trained_well(outcome: Outcome, work: Training) -> list[Check]:
    answers = outcome.answers
    whole = list(range(work.samples))
    epochs = [
        sorted(index for answer in answers for index in answer["used"][epoch]) == whole
        for epoch in range(work.epochs)
    ]
    finite = all(answer["finite"] for answer in answers)
    # The step with the overflow reports its loss before the case makes the loss infinite.
    losses = all(math.isfinite(s.loss) for s in outcome.steps if s.loss is not None)
    replicas = len({answer["digest"] for answer in answers})
    return [
        Check("different replicas", replicas, 1, "<="),
        Check("epochs with every sample once", sum(epochs), work.epochs, ">="),
        Check("parameters and losses are finite", finite and losses, 1, ">="),
    ]


def _conserved(outcome: Outcome, work: Training) -> Check:
    """Gradients that went into rounds or were dropped, beside those that ranks computed.

    All local batches have the same size, so dropped samples can be counted as gradients.
    """
    applied = sum(sum(record.staleness) for record in outcome.rounds)
    dropped = sum(r.dropped for r in outcome.rounds) / (work.batch / WORLD)
    steps = work.epochs * work.samples // work.batch - work.segment
    off = abs(applied + dropped - steps * WORLD)
    return Check("gradients neither applied nor counted as dropped", off, 0, "<=")


# Kinds


def kinds(kit: Kit) -> Result:
    """One rank on the GPU and two on the CPU train the same replica, and say what they are."""
    cases = {"allreduce": ALLREDUCE, "rna": RNA, "averaging": SYNCHRONISERS["averaging"]}
    return in_turn({name: partial(_kinds, kit, what) for name, what in cases.items()})


def _kinds(kit: Kit, what: Synchronisation) -> Result:
    work = Training((what,), cpu_ranks=(1, 2), epochs=1)
    mixed = kit.run(gpu_cases.trained, work)
    replicas = torch.tensor([answer["values"] for answer in mixed.answers])
    apart = float((replicas - replicas[0]).abs().max())
    kinds = [device.kind for device in mixed.devices]
    right = kinds == [kit.kind, "cpu", "cpu"]
    tried = sum(device.flops is not None for device in mixed.devices)
    # GPU and CPU round differently, so that replicas are equal up to rounding only.
    checks = [
        Check("values of replicas apart", apart, 1e-4, "<="),
        Check("ranks say what they compute on", right, 1, ">="),
        Check("ranks that made a trial", tried, WORLD if kit.cuda else 0, ">="),
    ]
    figures: Figures = {
        "apart": apart,
        "kinds": kinds,
        "flops": [device.flops for device in mixed.devices],
    }
    if what is ALLREDUCE:
        alone = kit.run(gpu_cases.trained, replace(work, cpu_ranks=(0, 1, 2)))
        beside = float((replicas[0] - torch.tensor(alone.answers[0]["values"])).abs().max())
        figures["beside_cpus_alone"] = beside
        checks.append(Check("values beside those of CPU ranks alone", beside, 1e-4, "<="))
    return figures, checks


# Overhead


def overhead(kit: Kit) -> Result:
    """Steps of a session and of plain DDP, taking turns."""
    worlds = {"one rank": 1, f"{WORLD} ranks under gloo": WORLD}
    return in_turn({name: partial(_overhead, kit, world) for name, world in worlds.items()})


def _overhead(kit: Kit, world: int) -> Result:
    pairs, hidden = 40 if kit.quick else 200, 256 if kit.cuda else 32
    answers = kit.run(gpu_cases.paired, pairs, hidden, world=world).answers
    both = [pair for answer in answers for pair in answer]
    over_us = 1e6 * statistics.median(pair.paced_s - pair.plain_s for pair in both)
    cpu_us = 1e6 * statistics.median(pair.paced_cpu_s - pair.plain_cpu_s for pair in both)
    plain_us = 1e6 * statistics.median(pair.plain_s for pair in both)
    # The goal is 200 µs. The bound leaves room for other GPUs and busy hosts.
    check = Check("overhead per step, µs, goal 200" + TIME, over_us, 1000.0, "<=")
    figures = {"overhead_us": over_us, "thread_us": cpu_us, "plain_us": plain_us, "goal_us": 200.0}
    return figures, [check]


# Copies


def copies(kit: Kit) -> Result:
    """Gradients are copied to the host during the next step, and arrive unchanged."""
    cases = {"one rank": partial(_copies, kit), "rounds of a large model": partial(_large, kit)}
    return in_turn(cases)


def _copies(kit: Kit) -> Result:
    size = Copying(4096, 4, 10, 4 if kit.quick else 8) if kit.cuda else Copying(64, 2, 2, 2)
    figures = kit.run(gpu_cases.copied, size, world=1).answers[0]
    blocks = figures.pop("blocks")
    for way in ("beside", "waiting"):
        ratios = [block[way] / block["alone"] for block in blocks]
        figures[f"{way}_over_alone"] = statistics.median(ratios)
    checks = [
        Check("copies hold their own step's gradients", figures["right"], 1, ">="),
        Check("seconds of a copy", figures["copied_s"], 1e-9, ">="),
    ]
    if kit.cuda:
        checks.append(Check("MB copied", figures["bytes"] / 1e6, LARGE_BYTES / 1e6, ">="))
        label = "step with its copy over without" + TIME
        checks.append(Check(label, figures["beside_over_alone"], 1.15, "<="))
    return figures, checks


def _large(kit: Kit) -> Result:
    """Rounds of a model of 67 MB on the GPU apply the same gradients as an all-reduce."""
    hidden = 4096 if kit.cuda else 64
    works = [Training((what,), hidden, samples=96, epochs=1) for what in (ALL, ALLREDUCE)]
    rounds, reduced = (kit.run(gpu_cases.trained, work) for work in works)
    got, want = (torch.tensor(outcome.answers[0]["values"]) for outcome in (rounds, reduced))
    difference = float((got - want).norm() / want.norm())
    copied_s = statistics.median(record.copied_s for record in rounds.rounds)
    checks = [
        Check("rounds of all ranks beside the all-reduce", difference, 1e-5, "<="),
        Check("seconds of a copy in rounds", copied_s, 1e-9, ">="),
        *_trained_well(rounds, works[0]),
    ]
    size = rounds.answers[0]["bytes"]
    return _summary(rounds) | {"bytes": size, "difference": difference}, checks


# Mixed precision


def mixed_precision(kit: Kit) -> Result:
    """Autocast and gradient scalers: after an overflow on one rank, all scales are equal."""
    chains = {"allreduce": (ALLREDUCE,), "rna": (RNA, ALLREDUCE)}
    return in_turn(
        {
            name + ", fused" * fused: partial(_mixed_precision, kit, chain, fused)
            for fused in (False, True)
            for name, chain in chains.items()
        }
    )


def _mixed_precision(kit: Kit, chain: tuple[Synchronisation, ...], fused: bool) -> Result:
    epochs = 1 if kit.quick else 2
    work = Training(chain, amp=True, fused=fused, overflow=(5, 1), epochs=epochs)
    outcome = kit.run(gpu_cases.trained, work)
    scales = [answer["scale"] for answer in outcome.answers]
    checks = [
        *_trained_well(outcome, work),
        Check("different scales", len(set(scales)), 1, "<="),
        Check("scale after the overflow", max(scales), 128.0, "<="),
    ]
    return _summary(outcome) | {"scales": scales}, checks


# Memory


def memory(kit: Kit) -> Result:
    """A profiling phase runs out of memory, says what fits, and training goes on."""
    answers = kit.run(gpu_cases.profiled).answers
    limits = [answer["limit"] for answer in answers]
    largest = max(answer["largest"] for answer in answers)
    right = sum(limit == gpu_cases.FITS for limit in limits)
    checks = [
        Check("ranks that know how many samples fit", right, WORLD, ">="),
        Check("samples of the largest batch after it", largest, gpu_cases.FITS, "<="),
    ]
    return {"limits": limits, "largest": largest}, checks
