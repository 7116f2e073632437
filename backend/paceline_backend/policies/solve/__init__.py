"""Solvers that decide which samples each worker gets, or how many.

    balance    `partition`: divides one global batch so that its slowest worker ends first
    descent    the exchanges with the slowest worker that improve a partition
    search     branch and bound for few samples
    padded     the same for padded batches
    compose    `compose`: puts an epoch in an order whose global batches divide well
    exchange   the exchanges between bins with which `compose` ends
    grid       `gridded`: a plan's numbers of samples on a grid, for few distinct shapes
    counts     from numbers of samples to batches, for presets with an allocator
    minmax     `minmax`: numbers of samples with the least makespan, exactly
    order      `epoch_order`: the order that PyTorch's DistributedSampler draws
    holdings   the samples that a worker holds, sorted by size (CHRONICA)
    filling    a global batch that is filled from holdings (CHRONICA)
    room       the storage of nodes, where data lives on them
    workers    `Workers`: models as compiled code takes them, and bounds

Schedulers and allocators of the presets call these:

    ranks = partition(sizes, models)  # the rank of each sample of a batch
"""
