"""Overhead per step of observing an unchanged script.

Two real ranks train a convolutional network under torch's DistributedDataParallel, with a loader
and a script that do not use Paceline. Blocks of steps with and without observing alternate in pairs
and in random order, so that other load on the machine affects both alike. Records go to a spool on
disk.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Check, finish, interleaved, median_interval, parser
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.train.observing import patches
from paceline.train.observing.observer import Observer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import Ranks

WORLD, BLOCK, WARM, CLASSES = 2, 10, 2, 10
# Maximum ratio of a step's time with observing to its time without.
BOUND = 1.01


def network() -> nn.Module:
    """Return a convolutional network for images of 32 × 32."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for channels, out, stride in ((3, 32, 1), (32, 64, 1), (64, 64, 2), (64, 128, 2)):
        convolution = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out), nn.ReLU()]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    return nn.Sequential(*layers, *pooled)


def measure(pairs: int, batch: int) -> tuple[list[dict[str, float]], int]:
    """Return, for each pair, the seconds of a block by way; and the number of observed steps."""
    observer = Observer()
    patches.apply(observer)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(batch * BLOCK, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (len(images),), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), batch_size=batch)
    seen = 0

    def block(observed: bool) -> float:
        nonlocal seen
        observer.ended = not observed
        seen += BLOCK * observed
        dist.barrier()
        began = time.perf_counter()
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    ways = {"observed": partial(block, True), "plain": partial(block, False)}
    times = interleaved(ways, pairs, WARM)
    observer.ended = False
    recorder = observer._recorder
    assert recorder is not None
    observer.close()
    assert recorder._seq == seen, "each observed step is reported"
    return times, seen


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__).parse_args()
    pairs, batch = (10, 8) if options.quick else (60, 16)
    ranks = Ranks(WORLD)
    with tempfile.TemporaryDirectory() as spool:
        env = {"PACELINE_OBSERVE": "1", "PACELINE_RUN": "bench", "PACELINE_SPOOL": spool}
        try:
            answers = ranks.run(partial(measure, pairs, batch), env=env, timeout_s=900)
        finally:
            ranks.stop()
        assert any(Path(spool).rglob("*")), "records are spooled"
    # A block's time is that of the slower rank.
    observed_s, plain_s = (
        [max(times[pair][way] for times, _ in answers) / BLOCK for pair in range(pairs)]
        for way in ("observed", "plain")
    )
    ratio, low, high = median_interval([a / b for a, b in zip(observed_s, plain_s, strict=True)])
    results = {
        "observed_s": statistics.median(observed_s),
        "plain_s": statistics.median(plain_s),
        "ratio": ratio,
        "interval_95": [low, high],
        "steps_observed": answers[0][1],
    }
    checks = [Check("an observed step over the same unobserved", results["ratio"], BOUND, "<=")]
    table = (
        f"step observed {1e3 * results['observed_s']:.2f} ms, unobserved "
        f"{1e3 * results['plain_s']:.2f} ms: {results['ratio']:.4f} ({low:.4f} to {high:.4f})"
    )
    config = {"ranks": WORLD, "batch": batch, "pairs": pairs, "steps_in_a_block": BLOCK}
    finish(options, config, results, checks, table)


if __name__ == "__main__":
    main()
