"""BatchNorm layers of a wrapped model, whose local batches are uneven, and at times empty.

`adapt` changes a model's layers in place. `Synchronised` ones normalise by the whole global batch,
`Local` ones by each rank's own batch. `RunningStatistics` makes the local layers' statistics agree
where all ranks meet. `Session.wrap` calls `adapt`, and the loop calls `agree`::

    adapt(model, "sync", current)  # before DistributedDataParallel sees the model
    statistics = RunningStatistics(current, models)
    statistics.agree()  # on all ranks, after the same step
"""
