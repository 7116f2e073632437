"""A stream of webdataset shards on ranks of uneven speeds: each sample once, in even steps.

Tar files are written, and four ranks read them with webdataset: their readers, the store in which
they meet, the claims of shards, the leader's ledger and the controller's predictor are those of a
training. Only time is virtual: a step takes each rank ``a·Λ + b`` s, and the slowest rank's time
counts. The predictor sees these times with noise. The first steps, before speeds are known, and the
last ones, when some ranks have nothing left, count too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser
from torch.distributed import HashStore

from paceline.core.cost import features
from paceline.core.terms import Terms
from paceline.data import Stream
from paceline.train.meeting import Meeting
from paceline.train.streams.gathering import Gathering
from paceline.train.streams.reader import Reader
from paceline.wire import Segment
from paceline_backend import policies
from paceline_backend.planning.feedback import COLUMNS, Window
from paceline_backend.planning.offer import segment_steps
from paceline_backend.policies.streams import plan_stream

A_S = np.array([1e-3, 1e-3, 1.5e-3, 3e-3])  # s per size unit
B_S = np.full(4, 5e-3)  # s per step
NOISE = 0.02
SHARD, BATCH, BUFFER = 500, 256, 2048
FEW = 40  # shards
BOUND, QUICK_BOUND = 1.03, 1.06  # times the fluid limit; of few steps the first weigh more


@dataclass
class Epoch:
    """What an epoch was like."""

    seconds: float  # virtual
    fluid_s: float  # if loads could be divided at will
    steps: int
    samples: int
    distinct: int
    per_rank: list[int]  # samples
    opened: int  # shards, again and again
    planned_s: float  # real time that planning took


def write_shards(folder: Path, shards: int, seed: int) -> list[str]:
    """Tar files whose samples have lognormal sizes; their paths."""
    import webdataset

    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, np.rint(rng.lognormal(4.0, 0.8, shards * SHARD))).astype(int)
    paths = []
    for shard in range(shards):
        paths.append(str(folder / f"{shard:05d}.tar"))
        with webdataset.TarWriter(paths[-1]) as tar:
            for number in range(shard * SHARD, (shard + 1) * SHARD):
                tar.write({"__key__": f"{number:08d}", "txt": str(sizes[number])})
    return paths


class Shards:
    """Opens shards with webdataset, and counts how often."""

    def __init__(self) -> None:
        self.opened = 0

    def __call__(self, path: str) -> Iterator[Any]:
        """The samples of a shard: key and size."""
        from webdataset.tariterators import group_by_keys, tar_file_expander

        self.opened += 1
        with Path(path).open("rb") as file:  # WebDataset(path) leaves it open
            for sample in group_by_keys(tar_file_expander([{"url": path, "stream": file}])):
                yield sample["__key__"], float(sample["txt"])


def epoch(paths: list[str], policy_name: str, seed: int) -> Epoch:
    """Trains an epoch in virtual time."""
    shards = Shards()
    stream = Stream.shards(paths, shards, size=lambda sample: sample[1], buffer=BUFFER)
    world = len(A_S)
    store, policy = HashStore(), policies.make(policy_name, {})
    key = bytes(32)
    readers = [Reader(stream, Meeting(r, world, store, -1, None, key), seed) for r in range(world)]
    gathering = Gathering(stream, Terms(0, BATCH, seed, False, "samples", 2), world, store, None)
    window, rng = Window(world, 0), np.random.default_rng(seed)
    ledger, step, planned_s = gathering.ledger, 0, 0.0
    seconds, fluid_s = 0.0, 0.0
    trained: list[list[Any]] = [[] for _ in readers]
    with ExitStack() as ends:
        for reader in readers:
            reader.begin(0)
            ends.callback(reader.close)
        while not ledger.over:
            if why := gathering.gather(lambda: False):
                raise RuntimeError(why)
            began = time.perf_counter()
            plan = plan_stream(policy, window.feedback(), segment_steps(window.step_s()), world)
            segment = ledger.filled(_proposal(plan, step, world))
            planned_s += time.perf_counter() - began
            for of_step in segment.assignments():
                counts = np.array([len(part) for part in of_step])
                of = features(ledger.sizes[np.concatenate(of_step)], counts)
                compute_s = np.where(counts > 0, A_S * of.load + B_S, 0.0)
                slowest = float(compute_s.max())
                seconds += slowest
                fluid_s += float((of.load.sum() + (B_S / A_S).sum()) / (1 / A_S).sum())
                measured_s = compute_s * (1 + NOISE * rng.standard_normal(world))
                columns = {**of._asdict(), "compute_s": measured_s, "recompiles": np.zeros(world)}
                columns |= {"sync_s": slowest - compute_s, "step_s": np.full(world, slowest)}
                window.put_step(step, np.stack([columns[n] for n in COLUMNS], 1).astype(float))
                step += 1
                for rank, part in enumerate(of_step):
                    if len(part):
                        trained[rank] += readers[rank].take(ledger.places[part].tolist())
            ledger.use(np.frombuffer(segment.indices, "<u4"))
    keys = [key for of_rank in trained for key, _ in of_rank]
    return Epoch(
        seconds,
        fluid_s,
        step,
        len(keys),
        len(set(keys)),
        [len(of_rank) for of_rank in trained],
        shards.opened,
        planned_s,
    )


def _proposal(plan: Any, step: int, world: int) -> Segment:
    counts = plan.batches.counts.tolist()
    fields = {"policy": "-", "version": 0, "source": "controller", "epoch_end": False}
    return Segment(0, 0, step, counts, b"", **fields, shares=plan.shares, paces=plan.paces)


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    shards = FEW if given.quick else 200
    results: dict[str, Any] = {}
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), shards, given.seed)
        for name in ("bsp", "paceline"):
            # `bsp` is there for comparison, and reading takes long.
            of = paths if name == "paceline" else paths[:FEW]
            ran = epoch(of, name, given.seed)
            samples = SHARD * len(of)
            over = float(ran.seconds / ran.fluid_s)
            results[name] = {**ran.__dict__, "over_fluid": over, "shards": len(of)}
            checks.append(Check(f"{name}: samples not trained", samples - ran.distinct, 0, "<="))
            checks.append(Check(f"{name}: trained again", ran.samples - ran.distinct, 0, "<="))
            if name == "paceline":
                bound = QUICK_BOUND if given.quick else BOUND
                checks.append(Check(f"{name}: time over the fluid limit", over, bound, "<="))
    config = {
        "samples": shards * SHARD, "shard": SHARD, "global_batch": BATCH, "buffer": BUFFER,
        "a_s": A_S.tolist(), "b_s": B_S.tolist(), "noise": NOISE, "seed": given.seed,
    }  # fmt: skip
    finish(given, config, results, checks, _table(results))


def _table(results: dict[str, Any]) -> str:
    def rows() -> Iterator[str]:
        yield f"{'policy':10} {'× fluid':>8} {'steps':>6} {'ms/plan':>8} {'opened':>7}  samples"
        for name, ran in results.items():
            yield (
                f"{name:10} {ran['over_fluid']:8.3f} {ran['steps']:6} "
                f"{1e3 * ran['planned_s'] / ran['steps']:8.2f} "
                f"{ran['opened']:4}/{ran['shards']}  {ran['per_rank']}"
            )

    return "\n".join(rows())


if __name__ == "__main__":
    main()
