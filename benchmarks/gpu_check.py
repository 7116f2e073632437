"""What runs on a GPU: times, gradients, synchronisers, overhead, copies and mixed precision.

Ranks share the first GPU: three under gloo, and one under NCCL, which refuses two on one device.
Without a GPU the program says so and exits 0; ``--device cpu`` runs the same checks on the CPU,
where figures of time mean little. All parts together end within 8 minutes. A check whose name
ends in "(time)" needs a device and a host that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Check, finish, parser, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import gpu_cases
from gpu_cases import Copying, Timing, Training

from paceline.node.spool import drain
from paceline.wire import (
    ALLREDUCE,
    RoundBatch,
    RoundRecord,
    StepBatch,
    StepRecord,
    Synchronisation,
    decode,
)
from support.ranks import Ranks

WORLD = 3  # ranks under gloo
WHOLE_S = 450.0  # for all parts; the rest of 8 minutes is for starting and ending
RESULTS = Path(__file__).parent / "results"
OUTPUT = "gpu.json"
LARGE_BYTES = 50 << 20  # of a model from which copies are timed
TIME = " (time)"  # ends the names of checks that depend on how fast things are

ALL = Synchronisation(
    "partial", {"quorum": WORLD, "staleness": 0, "waits": True, "mean": False}
)  # a partial reduction that is an all-reduce
RNA = Synchronisation("partial", {"probes": 2, "staleness": 4, "mean": True})
STEALING = Synchronisation(
    "partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False, "steals": True}
)
SYNCHRONISERS = {
    "allreduce": ALLREDUCE,
    "rna": RNA,
    "majority": Synchronisation("partial", {"probes": 1, "staleness": 4, "mean": False}),
    "n-soft": Synchronisation("partial", {"parts": 2, "staleness": 4, "mean": False}),
    "ssp": Synchronisation("partial", {"quorum": 1, "staleness": None, "lead": 2, "mean": False}),
    "backup": Synchronisation(
        "partial", {"spare": 1, "staleness": 0, "waits": True, "mean": False}
    ),
    "stealing": STEALING,
    "averaging": Synchronisation("averaging", {"every": 3}),
    "one-shot averaging": Synchronisation("averaging", {"every": None}),
    "pairwise": Synchronisation("pairwise"),
    "hierarchical": Synchronisation(
        "hierarchical",
        {"groups": [[0, 1], [2]], "every": 2, "probes": 2, "staleness": 4, "mean": True},
    ),
}
QUICK = ("allreduce", "rna", "backup", "stealing", "averaging", "pairwise", "hierarchical")


@dataclass
class Outcome:
    """What a case gave.

    Args:
        answers: of each rank.
        steps: that ranks reported.
        rounds: that ranks reported.
    """

    answers: list[Any]
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)


class Kit:
    """Runs cases on ranks that share a device.

    Args:
        kind: "cuda" or "cpu".
        quick: fewer steps.
        whole_s: for all parts.
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
        """Whether there is a GPU."""
        return self.kind == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds left for the part in hand."""
        return self._part_ends_at - time.monotonic()

    def begin(self, limit_s: float) -> None:
        """A part begins.

        Raises:
            TimeoutError: the parts before have taken all the time.
        """
        now = time.monotonic()
        self._part_ends_at = min(now + limit_s, self._ends_at)
        if self.left_s <= 0:
            raise TimeoutError("no time is left: the parts before it took too long")

    def run(self, case: Callable[..., Any], *args: Any, world: int = WORLD) -> Outcome:
        """Runs a case on all ranks, with telemetry.

        Raises:
            RankError: it raised on a rank, or did not end in time; then all ranks are killed.
        """
        with tempfile.TemporaryDirectory() as spool:
            environment = {"PACELINE_RUN": "gpu-check", "PACELINE_SPOOL": spool}
            answers = self._pools[world].run(
                case, self.kind, *args, env=environment, timeout_s=max(0.0, self.left_s)
            )
            entries: list[dict[bytes, bytes]] = []
            drain(Path(spool), entries.append, include_open=True)
        messages = [decode(entry)[1] for entry in entries]
        return Outcome(
            answers,
            [record for m in messages if isinstance(m, StepBatch) for record in m.records],
            [record for m in messages if isinstance(m, RoundBatch) for record in m.records],
        )

    def close(self) -> None:
        """Ends the ranks."""
        for pool in self._pools.values():
            pool.stop()


Figures = dict[str, Any]
Part = Callable[[Kit], tuple[Figures, list[Check]]]


# Timing


def times(kit: Kit, world: int, *, slow_rank: int = -1) -> tuple[Figures, list[Check]]:
    """Compute times that sessions report beside synchronised ones; a slowed rank shows it."""
    steps = 24 if kit.quick else 80
    # On a GPU of 50 TFLOPS a step computes for some ms, and the extra work for some ten.
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
        "unwatched_over_watched": _unwatched_over_watched(computed_s, steps),
        "first_half_s": [first for first, _ in halves],
        "second_half_s": [second for _, second in halves],
    }
    checks = [Check("median error of compute times" + TIME, figures["median_error"], 0.10, "<=")]
    checks.append(_all_reported(outcome, steps * world))
    if slow_rank >= 0:
        slower = [second / first for first, second in halves]
        others = [ratio for rank, ratio in enumerate(slower) if rank != slow_rank]
        checks.append(Check("slowed rank's time over before" + TIME, slower[slow_rank], 2.0, ">="))
        checks.append(Check("other ranks' time over before" + TIME, max(others), 1.5, "<="))
    return figures, checks


def _unwatched_over_watched(computed_s: dict[tuple[int, int], float], steps: int) -> float:
    """Compute times of steps that nobody synchronised beside the others', of the first half."""
    parts: list[list[float]] = [[], []]
    for (_, step), seconds in computed_s.items():
        if step < steps // 2:
            parts[step % 2].append(seconds)
    return statistics.median(parts[1]) / statistics.median(parts[0])


def _halves(computed_s: dict[tuple[int, int], float], rank: int, steps: int) -> tuple[float, float]:
    """Median compute times of a rank in the first and second half of the steps."""
    halves: list[list[float]] = [[], []]
    for (of, step), seconds in computed_s.items():
        if of == rank:
            halves[step >= steps // 2].append(seconds)
    return statistics.median(halves[0]), statistics.median(halves[1])


def _all_reported(outcome: Outcome, steps: int) -> Check:
    """Each rank's every step arrives in telemetry, with times that are not negative."""
    right = sum(s.compute_s > 0 and s.sync_s >= 0 and s.step_s > 0 for s in outcome.steps)
    return Check("share of steps reported", right / steps, 1.0, ">=")


def timing(kit: Kit) -> tuple[Figures, list[Check]]:
    """Three ranks under gloo, of which one gets more work."""
    return times(kit, WORLD, slow_rank=1)


def nccl(kit: Kit) -> tuple[Figures, list[Check]]:
    """One rank under NCCL: its times, and its gradients."""
    figures, checks = times(kit, 1)
    weights, more = _weighted(kit, "samples", [], world=1)
    return figures | weights, checks + more


# Gradients


def _weighted(
    kit: Kit, loss_mean: str, shares: list[float], *, world: int = WORLD
) -> tuple[Figures, list[Check]]:
    outcome = kit.run(gpu_cases.weighted, loss_mean, shares, "sequences", world=world)
    error = max(max(answer["errors"]) for answer in outcome.answers)
    empty = sum(answer["empty"] for answer in outcome.answers)
    name = f"mean over {loss_mean}, shares {shares or 'equal'}"
    checks = [Check(f"gradients' error, {name}", error, 1e-5, "<=")]
    if 0.0 in shares:
        checks.append(Check(f"empty batches, {name}", empty, 1, ">="))
    return {name: {"max_error": error, "empty": empty}}, checks


def gradients(kit: Kit) -> tuple[Figures, list[Check]]:
    """Uneven and empty batches beside one process that has the global batch."""
    figures: Figures = {}
    checks: list[Check] = []
    for loss_mean in ("samples", "size"):
        for shares in ([], [0.6, 0.3, 0.1], [0.8, 0.2, 0.0]):
            some, more = _weighted(kit, loss_mean, shares)
            figures |= some
            checks += more
    return figures, checks


def compiled(kit: Kit) -> tuple[Figures, list[Check]]:
    """A model of ``torch.compile`` in a session, if there is a compiler."""
    backend = "inductor" if kit.cuda else "eager"
    shares = [0.6, 0.3, 0.1]
    answers = kit.run(gpu_cases.weighted, "samples", shares, "mlp", backend).answers
    if why := next((a["unavailable"] for a in answers if "unavailable" in a), None):
        return {"skipped": why}, []
    error = max(max(answer["errors"]) for answer in answers)
    return {"max_error": error}, [Check("gradients' error, compiled", error, 1e-4, "<=")]


# Synchronisers


def synchronisers(kit: Kit) -> tuple[Figures, list[Check]]:
    """Under each, replicas are equal in the end, and no gradient is lost or counted twice."""
    figures: Figures = {}
    checks: list[Check] = []
    names = QUICK if kit.quick else SYNCHRONISERS
    for name in names:
        what = SYNCHRONISERS[name]
        slow = (2, 0.01) if name == "stealing" else None
        work = Training((what,), slow=slow, epochs=1 if kit.quick else 2)
        outcome = kit.run(gpu_cases.trained, work)
        figures[name] = _summary(outcome)
        checks += _trained_well(name, outcome, work)
        if what.name in ("partial", "hierarchical") and what is not STEALING:
            checks.append(_conserved(name, outcome, work))
        if what.name != "allreduce":
            checks.append(Check(f"{name}: rounds", len(outcome.rounds), 1, ">="))
    return figures, checks


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


def _trained_well(name: str, outcome: Outcome, work: Training) -> list[Check]:
    answers = outcome.answers
    whole = list(range(work.samples))
    epochs = [
        sorted(index for answer in answers for index in answer["used"][epoch]) == whole
        for epoch in range(work.epochs)
    ]
    finite = all(answer["finite"] for answer in answers)
    # The step with the overflow reports its loss before that is made infinite.
    losses = all(math.isfinite(s.loss) for s in outcome.steps if s.loss is not None)
    replicas = len({answer["digest"] for answer in answers})
    return [
        Check(f"{name}: different replicas", replicas, 1, "<="),
        Check(f"{name}: epochs with every sample once", sum(epochs), work.epochs, ">="),
        Check(f"{name}: parameters and losses are finite", finite and losses, 1, ">="),
    ]


def _conserved(name: str, outcome: Outcome, work: Training) -> Check:
    """Gradients that went into rounds or were dropped, beside those that ranks computed.

    All local batches have the same size, so dropped samples can be counted as gradients.
    """
    applied = sum(sum(record.staleness) for record in outcome.rounds)
    dropped = sum(r.dropped for r in outcome.rounds) / (work.batch / WORLD)
    steps = work.epochs * work.samples // work.batch - work.segment
    off = abs(applied + dropped - steps * WORLD)
    return Check(f"{name}: gradients neither applied nor counted as dropped", off, 0, "<=")


# Overhead


def overhead(kit: Kit) -> tuple[Figures, list[Check]]:
    """A session's step beside plain DDP's, in turn."""
    pairs = 40 if kit.quick else 200
    figures: Figures = {}
    checks = []
    for name, world in (("one rank", 1), (f"{WORLD} ranks under gloo", WORLD)):
        answers = kit.run(gpu_cases.paired, pairs, 256 if kit.cuda else 32, world=world).answers
        both = [pair for answer in answers for pair in answer]
        over_us = 1e6 * statistics.median(paced - plain for plain, paced in both)
        figures[name] = {
            "overhead_us": over_us,
            "plain_us": 1e6 * statistics.median(plain for plain, _ in both),
            "goal_us": 200.0,
        }
        # The goal is 200 µs. The bound is for other GPUs and busy hosts, too.
        label = f"overhead per step, µs, {name}, goal 200{TIME}"
        checks.append(Check(label, over_us, 1000.0, "<="))
    return figures, checks


# Copies


def copies(kit: Kit) -> tuple[Figures, list[Check]]:
    """Gradients are copied to the host beside the next step, and arrive as they were."""
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
    large, more = _large(kit)
    return figures | {"in rounds": large}, checks + more


def _large(kit: Kit) -> tuple[Figures, list[Check]]:
    """Rounds of a model of 67 MB on the GPU: they apply what an all-reduce would."""
    hidden = 4096 if kit.cuda else 64
    size = {"hidden": hidden, "samples": 96, "epochs": 1}
    rounds, reduced = (kit.run(gpu_cases.trained, Training((w,), **size)) for w in (ALL, ALLREDUCE))
    got, want = (torch.tensor(outcome.answers[0]["values"]) for outcome in (rounds, reduced))
    error = float((got - want).norm() / want.norm())
    copied_s = statistics.median(record.copied_s for record in rounds.rounds)
    checks = [
        Check("rounds of all ranks beside the all-reduce", error, 1e-5, "<="),
        Check("seconds of a copy in rounds", copied_s, 1e-9, ">="),
        *_trained_well("rounds of a large model", rounds, Training((ALL,), **size)),
    ]
    return _summary(rounds) | {"bytes": rounds.answers[0]["bytes"], "error": error}, checks


# Mixed precision


def mixed_precision(kit: Kit) -> tuple[Figures, list[Check]]:
    """Autocast and gradient scalers: after an overflow on one rank all have one scale again."""
    figures: Figures = {}
    checks: list[Check] = []
    for fused in (False, True):
        chains = {"allreduce": (ALLREDUCE,), "rna": (RNA, ALLREDUCE)}
        for name, chain in chains.items():
            label = f"{name}{', fused' if fused else ''}"
            epochs = 1 if kit.quick else 2
            work = Training(chain, amp=True, fused=fused, overflow=(5, 1), epochs=epochs)
            outcome = kit.run(gpu_cases.trained, work)
            scales = [answer["scale"] for answer in outcome.answers]
            figures[label] = _summary(outcome) | {"scales": scales}
            checks += _trained_well(f"mixed precision, {label}", outcome, work)
            checks.append(Check(f"{label}: different scales", len(set(scales)), 1, "<="))
            checks.append(Check(f"{label}: scale after the overflow", max(scales), 128.0, "<="))
    return figures, checks


# Memory


def memory(kit: Kit) -> tuple[Figures, list[Check]]:
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


PARTS: dict[str, tuple[Part, float]] = {  # what it does, and its time limit in seconds
    "timing": (timing, 90.0),
    "nccl": (nccl, 90.0),
    "gradients": (gradients, 60.0),
    "synchronisers": (synchronisers, 120.0),
    "overhead": (overhead, 60.0),
    "copies": (copies, 90.0),
    "mixed-precision": (mixed_precision, 60.0),
    "memory": (memory, 60.0),
    "compiled": (compiled, 100.0),
}


def run_parts(kit: Kit, names: Sequence[str]) -> tuple[Figures, list[Check]]:
    """Runs parts; if one fails or hangs, that is a failed check, and the others go on."""
    results: Figures = {}
    checks: list[Check] = []
    for name in names:
        part, limit_s = PARTS[name]
        print(f"{name} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        figures: Figures = {}
        try:
            kit.begin(limit_s)
            figures, made = part(kit)
        except Exception as error:
            figures, made = {"error": f"{type(error).__name__}: {error}"}, []
        checks.append(Check(f"{name}: ended without an error", "error" not in figures, 1, ">="))
        checks += [Check(f"{name}: {c.name}", float(c.value), c.bound, c.op) for c in made]
        results[name] = figures | {"seconds": time.monotonic() - began}
    return results, checks


def table_of(results: Figures) -> str:
    """Each part's figures, a line each."""
    lines = []
    for name, figures in results.items():
        lines.append(f"{name} ({figures['seconds']:.1f} s)")
        for key, value in figures.items():
            if key != "seconds":
                lines.append(f"  {key}: {_text(value)}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reason_to_skip(kind: str) -> str | None:
    """Why nothing can be checked here; None: it can."""
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds no CUDA device"
    return None


def config_of(kind: str) -> Figures:
    """The device, and versions."""
    made: Figures = {"device": kind, "torch": torch.__version__, "world": WORLD}
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        made |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return made


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    made.add_argument(
        "--out", type=Path, help=f"JSON file; on a GPU benchmarks/results/{OUTPUT} by default"
    )
    return made.parse_args(arguments)


def main() -> None:
    """Runs the checks."""
    options = options_of()
    if why := reason_to_skip(options.device):
        finish(options, {"device": options.device}, {"skipped": why}, [], f"skipped: {why}")
    config = config_of(options.device) | {"quick": options.quick}
    kit = Kit(options.device, quick=options.quick)
    try:
        results, checks = run_parts(kit, options.only or [*PARTS])
    finally:
        kit.close()
    out = options.out or (RESULTS / OUTPUT if kit.cuda and not options.only else None)
    if out is not None:
        out.write_text(json.dumps(report(config, results, checks), indent=1) + "\n")
    finish(options, config, results, checks, table_of(results))


if __name__ == "__main__":
    main()
