"""Solvers that choose each worker's samples, or the number of samples of each worker.

    balance      `partition`: divides one global batch so that its slowest worker ends first
    explore      `explore`: a longer search than that of `partition`, for `paceline.partition`
    padded       `partition_padded`: as `partition`, for padded batches
    hedged       `partition_hedged`: as `partition`, while several costs of a batch are plausible
    compose      `compose`: puts an epoch in an order whose global batches divide well
    constraints  `gridded`, `within_limits`: a plan's counts on a grid, and limits of local batches
    counts       batches from the ranks' numbers of samples, for presets with an allocator
    minmax       `minmax`: numbers of samples with the least makespan, exactly
    order        `epoch_order`: the order that PyTorch's DistributedSampler draws
    filling      a global batch that is filled from the samples that workers hold (CHRONICA)
    nodes        placements that keep samples on their nodes, and the nodes' free storage
    workers      `Workers`: models in the form that compiled code needs; bounds of a step's time

Schedulers and allocators of the presets call these functions:

    ranks = partition(sizes, models)  # the rank of each sample of a batch
"""
