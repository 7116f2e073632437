"""RNA: 10 figures, 5 tables, and the condition of its theorems."""

from __future__ import annotations

from figures.row import How, Row

RECORDS = (
    "Eight ranks on two cores, means of five seeds, from the records of "
    "`benchmarks/synchronisers.py`. For ResNet50: digits, delays of 0 to 50 ms; "
    "(H): half of the ranks 50 ms slower; for the LSTM: an LSTM on PLAID's recordings. VGG16: "
    "nothing here has its gradients."
)
AGAIN = "python benchmarks/synchronisers.py --only delays groups lengths --json"
FAST = (
    "Exchanges of small models on two cores cost about as much as computing. AD-PSGD's are "
    "the cheapest, so it is far ahead here, and loses no accuracy."
)
TRANSFORMER = (
    "Padded batches of 160 sentences (lognormal, mean 25 tokens), 2 % noise, EDR InfiniBand."
)

ROWS = (
    Row(
        "rna-fig-1",
        "Computing and waiting of three workers, two of them delayed; two models",
        How.VIRTUAL,
        "40 ms of computing, 10 and 40 ms more for workers 2 and 3; both models' gradients "
        "over 10 Gbit/s.",
        {"ResNet-56, worker 3 over worker 1, computing": 2},
        why="The text says nearly twice as fast; the computing time of 40 ms is chosen for that.",
        measure="rna_runs:figure_1",
        fed=("ResNet-56, worker 3 over worker 1, computing",),
    ),
    Row(
        "rna-fig-2",
        "Lengths of UCF101's videos, and the times of an LSTM's batches",
        How.VIRTUAL,
        "13,320 lengths drawn lognormal; batches of 32 whose cost is the sum of frames, or "
        "padded; a frame's time is fitted to the mean.",
        {
            "frames, mean": 186,
            "frames, standard deviation": 97.7,
            "frames, least": 29,
            "frames, most": 1776,
            **{
                f"batch, {cost}, {what}, ms": value
                for cost in ("summed", "padded")
                for what, value in (
                    ("mean", 1219),
                    ("standard deviation", 760),
                    ("least", 156),
                    ("most", 8000),
                )
            },
        },
        why="The longest of 13,320 draws is shorter than UCF101's longest video. A batch of "
        "32 padded videos comes nearer to the paper's spread than "
        "their sum, but not near: its longest batch takes 6.6 times the mean, and 1,776 "
        "frames are 9.5 times a mean video.",
        measure="rna_runs:figure_2",
        fed=(
            *(f"frames, {what}" for what in ("mean", "standard deviation", "least", "most")),
            *(f"batch, {cost}, mean, ms" for cost in ("summed", "padded")),
        ),
    ),
    Row(
        "rna-fig-3",
        "Three workers with a blocking and a non-blocking all-reduce",
        How.VIRTUAL,
        "A, B and C take 20, 60 and 30 ms; the draw in which C is probed first.",
        why="a diagram without numbers. As in the picture, B gives nothing to the first "
        "round, and nobody waits.",
        measure="rna_runs:figure_3",
    ),
    Row(
        "rna-fig-4",
        "Which gradients of two workers go into which round, and their weights",
        How.EXAMPLE,
        "A worker that has two gradients, one iteration apart.",
        {"weight of the older gradient": 1 / 3, "weight of the newer gradient": 2 / 3},
        why="theirs are what Sec. 3.3's formula gives by hand.",
        measure="rna_runs:figure_4",
    ),
    Row(
        "rna-fig-5",
        "Groups of workers, and a parameter server between them",
        How.EXAMPLE,
        "The rule ζ > v on Sec. 8.1's two halves, with delays of 25 and 75 ms in the mean.",
        {"groups, computing for 5 ms": 2},
        why="By the rule as printed these halves are one group, whatever computing takes: "
        "their difference is 50 ms, and the mean time is 50 ms or more. "
        "The paper says that there are two. With a `spread` of 0.7 there are.",
        measure="rna_runs:figure_5",
    ),
    Row(
        "rna-fig-6",
        "Training speed-up over Horovod: eager-SGD, AD-PSGD, RNA; three models, mixed "
        "heterogeneity",
        How.REAL,
        f"Seconds to a held-out loss. {RECORDS}",
        {
            "ResNet50, eager-SGD": 1.3,
            "ResNet50, RNA": 1.7,
            "ResNet50 (H), eager-SGD": 1.1,
            "ResNet50 (H), RNA": 1.5,
            "ResNet50 (H), RNA-H": 1.8,
            "LSTM, RNA": 1.6,
            "VGG16, RNA": 1.4,
            "VGG16 (H), RNA-H": 1.4,
        },
        "times Horovod",
        f"{FAST} On PLAID the batches of four recordings spread less than the paper's videos.",
        "rna_runs:figure_6",
        AGAIN,
    ),
    Row(
        "rna-fig-7",
        "Loss and accuracy of the LSTM over time",
        How.REAL,
        f"Ends of the curves. {RECORDS}",
        {"RNA's speed-up to the target": 8200 / 5200},
        why=f"{FAST} The text gives 8,200 and 5,200 ms. The curves themselves are not recorded.",
        measure="rna_runs:figure_7",
        command=AGAIN,
    ),
    Row(
        "rna-fig-8",
        "Speed-up per iteration and overall on a Transformer, even and uneven cluster",
        How.VIRTUAL,
        f"16 workers; uneven: 0 to 50 ms at random. {TRANSFORMER} Overall is samples a second: "
        "the simulator says nothing of losses.",
        {
            "eager-SGD, even, per iteration": 1.9,
            "AD-PSGD, even, per iteration": 1.4,
            "RNA, even, per iteration": 2.6,
            "eager-SGD, even, samples/s": 1.4,
            "AD-PSGD, even, samples/s": 1.2,
            "RNA, even, samples/s": 2.2,
            "eager-SGD, uneven, per iteration": 1.3,
            "AD-PSGD, uneven, samples/s": 1.6,
            "RNA, uneven, samples/s": 2.3,
        },
        "times Horovod",
        "RNA calls rounds sooner here than in the paper, with fewer gradients each; counted "
        "by samples the gain is bounded by what the all-reduce's "
        "slowest worker wastes, 1.7. The paper does not give the spread of its batches' "
        "times. Its AD-PSGD pays for locks, ours does not.",
        "rna_runs:figure_8",
    ),
    Row(
        "rna-fig-9",
        "Throughput on a Transformer by number of processes",
        How.VIRTUAL,
        f"4 to 32 workers, 0 to 50 ms at random. {TRANSFORMER}",
        unit="samples/s",
        why="the text has no numbers. As there, RNA and AD-PSGD scale best and AD-PSGD is a "
        "little ahead at 32; at 4 eager-SGD is behind RNA here, "
        "and equal in the paper.",
        measure="rna_runs:figure_9",
    ),
    Row(
        "rna-fig-10",
        "Response time of a round by number of probes",
        How.VIRTUAL,
        "100 workers, steps of 10 to 50 ms, 2,000 rounds each, for several costs of a message.",
        {"all begin anew, 1 probe, ms": 28, "messages for nothing, 2 probes, ms": 12},
        why="Two probes cannot have a median of 12 ms where all begin anew (21.5 ms), and one "
        "cannot have 28 where workers compute on (15.7): "
        "docs/papers.md. Here a third probe only costs where a message takes 2.6 ms.",
        measure="rna_runs:figure_10",
        command="python benchmarks/probes.py --json > benchmarks/results/probes.json",
    ),
    Row(
        "rna-table-1",
        "Notation of the analysis",
        How.LEARNING,
        "What the symbols come to for one layer on digits under RNA's simulated rounds, as in "
        "[rna-theorems](#rna-theorems).",
        why="the table only names the symbols; 𝔹 it calls the weights of parameters.",
        measure="rna_theory:theorems",
    ),
    Row(
        "rna-table-2",
        "Hardware of the cluster",
        How.NONE,
        why="a list of hardware; nothing in it can be reproduced.",
    ),
    Row(
        "rna-table-3",
        "Final training accuracy by approach and model",
        How.REAL,
        f"Accuracy on held-out data, as that on training data is not recorded. {RECORDS}",
        {
            f"{approach}, {model}, %": value
            for approach, values in {
                "Horovod": (78, 79, 88.2),
                "eager-SGD": (76.2, 75.8, 87.5),
                "AD-PSGD": (70.8, 68, 78.8),
                "RNA": (78.2, 77.8, 87.8),
            }.items()
            for model, value in zip(("ResNet50", "ResNet50 (H)", "LSTM"), values, strict=True)
        },
        why="Other models and data, so only differences between approaches compare: RNA loses "
        "0.6, 0.9 and 5.9 points to the all-reduce here (−0.2, 1.2 and 0.4 in "
        "the paper). AD-PSGD loses 7 to 11 points in the paper, and at most 1.5 here: our "
        "replicas become their mean before they are rated.",
        measure="rna_runs:table_3",
        command=AGAIN,
    ),
    Row(
        "rna-table-4",
        "Iterations and validation accuracy by approach and model",
        How.REAL,
        f"Updates of rank 0's parameters until the target loss, over the all-reduce's. {RECORDS}",
        {
            "ResNet50, eager-SGD, iterations over Horovod's": 49800 / 42200,
            "ResNet50, AD-PSGD, iterations over Horovod's": 38800 / 42200,
            "ResNet50, RNA, iterations over Horovod's": 52400 / 42200,
            "LSTM, eager-SGD, iterations over Horovod's": 9600 / 8120,
            "LSTM, AD-PSGD, iterations over Horovod's": 7800 / 8120,
            "LSTM, RNA, iterations over Horovod's": 9660 / 8120,
            **{
                f"{model}, {approach}, accuracy, %": value
                for model, values in {
                    "ResNet50": (76.2, 74.8, 68.8, 75.9),
                    "LSTM": (68.2, 66.8, 60.6, 66.5),
                }.items()
                for approach, value in zip(
                    ("Horovod", "eager-SGD", "AD-PSGD", "RNA"), values, strict=True
                )
            },
        },
        why="Other models and data. RNA's rounds have fewer gradients here than in the paper, "
        "so it makes more of them; in AD-PSGD a rank that computes a step "
        "and is averaged with changes twice. Top-5 accuracy makes no sense of ten classes.",
        measure="rna_runs:table_4",
        command=AGAIN,
    ),
    Row(
        "rna-table-5",
        "Share of copying between GPU and host in an iteration, four models",
        How.NONE,
        why="ranks on CPUs copy nothing between GPU and host. `make gpu-check` measures it "
        "where there is a GPU, for its own models.",
    ),
    Row(
        "rna-theorems",
        "Step lengths for which Theorems 5.1 and 5.2 promise convergence",
        How.LEARNING,
        "One layer on digits, whose L is known; staleness and givers of RNA's simulated "
        "rounds (eight workers, delays of 0 to 50 ms); 𝔹 is taken as the givers.",
        why="the paper evaluates neither. Eq. 3 asks for more rounds than were trained here, and "
        "with fewer rounds Eq. 4's step is longer than Eq. 1 allows: the theorems promise nothing "
        "yet. Over all rounds the mean is below Eq. 9's bound all the same.",
        measure="rna_theory:theorems",
    ),
)
