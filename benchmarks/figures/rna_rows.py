"""RNA: 10 figures, 5 tables, and the condition of its theorems."""

from __future__ import annotations

from figures.row import How, Row

ROWS = (
    Row(
        "rna-fig-1",
        "Computing and waiting of three workers, two of them delayed; two models",
        How.VIRTUAL,
    ),
    Row("rna-fig-2", "Lengths of UCF101's videos, and the times of an LSTM's batches", How.VIRTUAL),
    Row("rna-fig-3", "Three workers with a blocking and a non-blocking all-reduce", How.VIRTUAL),
    Row(
        "rna-fig-4",
        "Which gradients of two workers go into which round, and their weights",
        How.EXAMPLE,
    ),
    Row("rna-fig-5", "Groups of workers, and a parameter server between them", How.EXAMPLE),
    Row(
        "rna-fig-6",
        "Training speed-up over Horovod: eager-SGD, AD-PSGD, RNA; three models, mixed heterogeneity",
        How.REAL,
    ),
    Row("rna-fig-7", "Loss and accuracy of the LSTM over time", How.REAL),
    Row(
        "rna-fig-8",
        "Speed-up per iteration and overall on a Transformer, even and uneven cluster",
        How.VIRTUAL,
    ),
    Row("rna-fig-9", "Throughput on a Transformer by number of processes", How.VIRTUAL),
    Row("rna-fig-10", "Response time of a round by number of probes", How.VIRTUAL),
    Row("rna-table-1", "Notation of the analysis", How.NOT),
    Row("rna-table-2", "Hardware of the cluster", How.NOT),
    Row("rna-table-3", "Final training accuracy by approach and model", How.REAL),
    Row("rna-table-4", "Iterations and validation accuracy by approach and model", How.REAL),
    Row(
        "rna-table-5", "Share of copying between GPU and host in an iteration, four models", How.NOT
    ),
    Row(
        "rna-theorems",
        "Step lengths for which Theorems 5.1 and 5.2 promise convergence",
        How.LEARNING,
    ),
)
