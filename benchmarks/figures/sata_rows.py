"""SATA: 7 figures."""

from __future__ import annotations

from figures.row import How, Row

GPUS = (
    "Speeds by the GPUs' single-precision peaks (11.3, 13.4 and 15.7 TFLOPS), 128 samples a "
    "worker, 2 % noise: the paper gives no "
    "times. Initial shares are fixed batches in the first epoch; then the run switches to `sata`."
)

ROWS = (
    Row(
        "sata-fig-1",
        "How shares of one epoch follow from shares and times of the epoch before",
        How.EXAMPLE,
        "Eq. 8 for shares of a half and times of 2 and 6; the figure itself has no numbers.",
        {"share of worker 1": 0.75, "share of worker 2": 0.25},
        why="theirs are what Eq. 8 gives by hand.",
        measure="sata_runs:figure_1",
    ),
    Row(
        "sata-fig-2",
        "The procedure with three GPUs: data and batches are divided anew each epoch",
        How.VIRTUAL,
        f"One GPU of each type. {GPUS}",
        unit="samples",
        why="a diagram without numbers.",
        measure="sata_runs:figure_2",
    ),
    Row(
        "sata-fig-3",
        "Computing time, share and epoch time by epoch; a 2080 Ti and a 1080 Ti in one machine",
        How.VIRTUAL,
        GPUS,
        why="the text has no numbers: it says that times fall, the gap closes, and shares "
        "become steady after several epochs. Here that takes "
        "two or three, as Eq. 8 is exact for a time proportional to samples.",
        measure="sata_runs:figure_3",
    ),
    Row(
        "sata-fig-4",
        "The same on three machines with 2080 Ti and V100, from other initial shares",
        How.VIRTUAL,
        f"Two 2080 Ti and a V100. {GPUS}",
        why="as Fig. 3.",
        measure="sata_runs:figure_4",
    ),
    Row(
        "sata-fig-5",
        "Time of an epoch with equal and with adapted shares, three groups of GPUs",
        How.VIRTUAL,
        GPUS,
        why="the figure's numbers are not in the text. The abstract says 20 to 40 % less "
        "time, without naming GPUs: by their peaks these GPUs are "
        "too much alike for that.",
        measure="sata_runs:figure_5",
    ),
    Row(
        "sata-fig-6",
        "Loss over time with a straggler 2 and 10 times slower: All-Reduce, AD-PSGD, SATA",
        How.LEARNING,
        "All-Reduce and SATA: digits, 64 samples a step, each of which "
        "takes as long as 16 of the scenario's, ten epochs. AD-PSGD: seconds to a loss of "
        "0.4 on real ranks, from the record of `benchmarks/synchronisers.py --only 2x 10x`.",
        why="the text has no numbers; it says that SATA converges soonest. Here AD-PSGD is as soon "
        "or sooner: fast ranks take over a slow rank's batches, and exchanges run beside "
        "computing. SATA's first epoch still has equal shares.",
        measure="sata_runs:figure_6",
    ),
    Row(
        "sata-fig-7",
        "Speed-up with a straggler 2 and 5 times slower: All-Reduce, AD-PSGD, SATA",
        How.VIRTUAL,
        "Eight workers, one of them slower, ResNet-50's gradients; samples a second after the "
        "first epoch.",
        {
            "SATA over All-Reduce, 2x": 3.3,
            "SATA over All-Reduce, 5x": 3.3,
            "SATA over AD-PSGD, 2x": 3.8,
            "SATA over AD-PSGD, 5x": 1.9,
        },
        "times",
        "With one of eight workers 2 times slower, perfect balance gains 1.88 times at most, "
        "so 3.3 cannot be balance alone. Our AD-PSGD "
        "overlaps exchanges and shares batches, so it loses nothing to the straggler; theirs "
        "seems to count time to a loss.",
        "sata_runs:figure_7",
    ),
)
