"""CHRONICA: 14 figures, 6 tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from figures.row import How, Row

SYSTEMS = ("TensorFlow", "BOA", "EP4DDL", "CHRONICA")
TABLE_4 = {
    0: (234, 232, 235, 231),
    4: (263, 242, 260, 235),
    8: (295, 251, 289, 236),
    16: (334, 283, 338, 237),
    32: (423, 343, 431, 243),
    64: (578, 426, 584, 247),
}
TABLE_5 = {
    "VGG16": (628, 440, 630, 249),
    "ResNet-50": (578, 426, 584, 247),
    "MobileNetV1": (139, 113, 143, 85),
    "EfficientNet-B0": (143, 115, 148, 86),
}
EIGHT = (
    "Eight workers, fitted to TensorFlow's 234 s at DIF 0 in Table IV; sizes drawn from a gamma "
    "distribution of mean 45. In the uneven cluster four workers take 1.7 times as long."
)
LEARNT = (
    "1,198 videos (a digit of scikit-learn's, repeated with noise as often as its size says), "
    "Adam, "
    "small networks instead of the paper's; times as in Table IV. Means of two seeds."
)
TAIL = (
    "A step's time is its slowest worker's, so it depends on the sizes' tail, which the paper does "
    "not give (a normal distribution with its mean and DIF would be negative in part)."
)


def _of(table: Mapping[Any, Sequence[int]], word: str) -> dict[str, float]:
    return {
        f"{system}, {word}{key}": float(value)
        for key, row in table.items()
        for system, value in zip(SYSTEMS, row, strict=True)
    }


ROWS = (
    Row(
        "chronica-fig-1",
        "Job time and peak device memory as sizes spread, against equal sizes; four models, "
        "two clusters",
        How.VIRTUAL,
        f"{EIGHT} The other models are a speed and a cost per epoch each, fitted to Table V. "
        "For memory: the "
        "largest load that a worker held in a step. The paper's numbers are Table IV's, over "
        "its first row.",
        {f"time, ResNet-50, equal, DIF {dif}": row[0] / 234 for dif, row in TABLE_4.items()},
        "times that at DIF 0",
        f"{TAIL} Both grow steadily, here less: 1.95 times and 2.47. Memory in bytes is not "
        "modelled.",
        "chronica_runs:figure_1",
        fed=("time, ResNet-50, equal, DIF 0",),
    ),
    Row(
        "chronica-fig-2",
        "ResNet-50 converges more slowly, the more sizes spread",
        How.LEARNING,
        f"Plain means over workers, as TensorFlow takes them. {LEARNT}",
        why="The text has no numbers. The same direction here: 2 % more steps at DIF 16 and "
        "a quarter more at 64.",
        measure="chronica_learning:figure_2",
    ),
    Row(
        "chronica-fig-3",
        "The four parts at work: loads of 234 and 244 for two workers",
        How.EXAMPLE,
        "The scheduler on the seven samples of Fig. 5. The first pick is random; the draw "
        "that begins with 156 is shown.",
        {"worker 1, s": 234, "worker 2, s": 244},
        measure="chronica_runs:picks",
    ),
    Row(
        "chronica-fig-4",
        "The prophet's regression: a sample's expected time after new feedback",
        How.EXAMPLE,
        "A sample of size 49, after feedback of a worker with (a, b) of (3, 3) and then (5, 2).",
        {"before, s": 150, "after, s": 247},
        measure="chronica_runs:figure_4",
    ),
    Row(
        "chronica-fig-5",
        "The scheduler's picks for two workers and a batch of four",
        How.EXAMPLE,
        "The picks 156, 129, 105 and 88, as in Fig. 3.",
        {"worker 1, s": 234, "worker 2, s": 244},
        measure="chronica_runs:picks",
    ),
    Row(
        "chronica-fig-6",
        "The shuffler moves two samples from the loaded worker to the other",
        How.EXAMPLE,
        "Samples that cost worker 2 45 and 39 s, and worker 1 39 and 27 s.",
        {"samples moved": 2, "worker 1 before, s": 678, "worker 2 before, s": 806},
        measure="chronica_runs:figure_6",
    ),
    Row(
        "chronica-fig-7",
        "Spread of the workers' loads in each step, by system",
        How.VIRTUAL,
        f"DIF 64, equal workers. {EIGHT} EP4DDL has TensorFlow's batches.",
        unit="frames",
        why="The text has no numbers. It says that BOA's spread is rather low; with equal "
        "workers BOA's counts are equal, so here "
        "it is TensorFlow's.",
        measure="chronica_runs:figure_7",
    ),
    Row(
        "chronica-fig-8",
        "Normalised job time by spread of sizes, four systems, two clusters",
        How.VIRTUAL,
        EIGHT,
        {
            "TensorFlow, equal, DIF 64": 578 / 234,
            "BOA, equal, DIF 64": 426 / 234,
            "CHRONICA, equal, DIF 64": 247 / 234,
            "CHRONICA below EP4DDL at DIF 64, %": 100 * (1 - 247 / 584),
        },
        "times TensorFlow's at DIF 0",
        f"{TAIL} CHRONICA itself comes out the same; what it saves is as much less as "
        "TensorFlow loses less. BOA as in Fig. 7.",
        "chronica_runs:figure_8",
    ),
    Row(
        "chronica-fig-9",
        "Error of the expected times in each step, three systems",
        How.VIRTUAL,
        f"DIF 64, 120 steps, equal workers, 2 % noise. {EIGHT} BOA expects a time by the "
        "number of samples.",
        unit="of a worker's step",
        why="The text has no numbers. The order is the paper's, but for EP4DDL, whose network "
        "is not told the sizes: the paper finds its "
        "error rather small. CHRONICA as printed adds a step's cost once for each sample "
        "(docs/policies.md).",
        measure="chronica_runs:figure_9",
    ),
    Row(
        "chronica-fig-10",
        "Loss over time by spread of sizes, four systems",
        How.LEARNING,
        f"{LEARNT} EP4DDL has TensorFlow's batches and times.",
        why="The text has no numbers. CHRONICA needs about the same time up to DIF 16, and "
        "1.4 times as long at 64; TensorFlow 2.4 times.",
        measure="chronica_learning:figure_10",
    ),
    Row(
        "chronica-fig-11",
        "Loss over time for four models at DIF 64, four systems",
        How.LEARNING,
        LEARNT,
        why="The text has no numbers; it says that CHRONICA is the fastest for all four, as here.",
        measure="chronica_learning:figure_11",
    ),
    Row(
        "chronica-fig-12",
        "Normalised job time for four models, four systems, two clusters",
        How.VIRTUAL,
        "DIF 64; models as in Fig. 1, so TensorFlow's and CHRONICA's times on equal workers "
        f"are fitted. {EIGHT}",
        {
            f"{system}, {model}, equal": row[at] / row[0]
            for model, row in TABLE_5.items()
            for at, system in ((1, "BOA"), (3, "CHRONICA"))
        },
        "times TensorFlow's",
        "BOA as in Fig. 7: with equal workers its counts are equal. On uneven workers it "
        "gains here, too. The paper's BOA gains "
        "on equal workers without a reason given.",
        "chronica_runs:figure_12",
        fed=tuple(f"CHRONICA, {model}, equal" for model in TABLE_5),
    ),
    Row(
        "chronica-fig-13",
        "Convergence with and without the learning-rate compensator, two clusters",
        How.LEARNING,
        "DIF 64, CHRONICA's batches; plain means (Eq. 3) and the product's weights (Eq. 7). "
        f"{LEARNT}",
        {"fewer steps, equal workers, %": 1, "fewer steps, uneven workers, %": 7},
        why="Here the compensator changes nothing under CHRONICA's batches. A digit does not "
        "depend on how often it is repeated, so "
        "both weights have the same mean gradient and differ in variance only. With "
        "TensorFlow's batches Eq. 7 is slower, because the "
        "repetitions of few long videos decide. In real videos content may depend on length, "
        "and then plain means are biased.",
        measure="chronica_learning:figure_13",
    ),
    Row(
        "chronica-fig-14",
        "Speed-up from 1 to 32 workers, four systems, two clusters",
        How.VIRTUAL,
        f"Local batch 4, DIF 64, 1,024 videos. {EIGHT} With EP4DDL, 32 uneven workers: from "
        "the record of `benchmarks/papers.py`.",
        {"CHRONICA over EP4DDL, 32 uneven workers": 3.19},
        "times one worker's",
        f"{TAIL} With EP4DDL's loss smaller, so is what CHRONICA gains. Free mode gains 2.75.",
        "chronica_runs:figure_14",
    ),
    Row(
        "chronica-table-1",
        "Number of videos and DIF of seven data sets",
        How.VIRTUAL,
        "Sizes that the simulator draws, as many as each data set has (lognormal, mean 186), "
        "and the DIF that comes out by the "
        "product's definition; PLAID's recordings are real.",
        {
            "UCF101, drawn": 3.73,
            "Charades, drawn": 9.44,
            "DAVIS, drawn": 18.36,
            "HACS, drawn": 64.13,
            "COIN, drawn": 70.02,
            "YouTube-BoundingBoxes, drawn": 212.64,
            "Sports-1M, drawn": 539.75,
        },
        "DIF",
        "The data sets are not here: the DIF is asked for and comes out. This tests the draw, "
        "not the data.",
        "chronica_runs:table_1",
        fed=tuple(
            f"{name}, drawn"
            for name in (
                "UCF101",
                "Charades",
                "DAVIS",
                "HACS",
                "COIN",
                "YouTube-BoundingBoxes",
                "Sports-1M",
            )
        ),
    ),
    Row(
        "chronica-table-2",
        "Hardware of the two instance types",
        How.NONE,
        why="a list of hardware; nothing in it can be reproduced. "
        "`examples/scenarios/chronica-heterogeneous.yaml` has what is taken from it.",
    ),
    Row(
        "chronica-table-3",
        "Parameters, operations and published accuracy of the four models",
        How.NONE,
        why="figures of the models' own papers, not of CHRONICA. The models are not here; "
        "ours are small networks.",
    ),
    Row(
        "chronica-table-4",
        "Seconds per epoch by DIF, four systems, eight equal workers",
        How.VIRTUAL,
        f"{EIGHT} `levelled` is CHRONICA by default, `exact` and `free` are the modes of "
        "`paceline`.",
        _of(TABLE_4, "DIF "),
        "s",
        f"{TAIL} BOA and EP4DDL change nothing on equal workers: docs/papers.md. CHRONICA as "
        "printed is up to 6 % slower at small DIF.",
        "chronica_runs:table_4",
        "python benchmarks/papers.py --json > benchmarks/results/papers.json",
        fed=tuple(f"{system}, DIF 0" for system in SYSTEMS),
    ),
    Row(
        "chronica-table-5",
        "Seconds per epoch for four models at DIF 64, four systems",
        How.VIRTUAL,
        "A model is a speed and a cost per step, fitted to its TensorFlow and CHRONICA "
        "columns; the other columns follow.",
        _of(TABLE_5, ""),
        "s",
        "BOA as in Fig. 7. TensorFlow and CHRONICA agree by construction.",
        "chronica_runs:table_5",
        "python benchmarks/papers.py --json > benchmarks/results/papers.json",
        fed=tuple(
            f"{system}, {model}" for system in ("TensorFlow", "CHRONICA") for model in TABLE_5
        ),
    ),
    Row(
        "chronica-table-6",
        "Where the time goes: feedback, schedule, shuffle, lock, training; 8 and 32 workers",
        How.VIRTUAL,
        "Real time that planning took on this machine, over virtual time of two epochs with "
        "MobileNetV1's speed. The segments at whose end "
        "samples are reshuffled are counted as a whole.",
        {
            "schedule, 8 workers, %": 0.02,
            "schedule, 32 workers, %": 0.02,
            "segments with a shuffle, 8 workers, %": 0.01,
            "segments with a shuffle, 32 workers, %": 0.02,
            "training, 8 workers, %": 97.01,
            "training, 32 workers, %": 98.38,
        },
        "of the time",
        "Planning takes milliseconds a segment here, in Python, and steps "
        "are short. It runs while ranks train, so "
        "training does not wait for it: there is no lock (1.25 to 2.4 % in the paper), and "
        "feedback travels beside the steps.",
        "chronica_runs:table_6",
    ),
)
