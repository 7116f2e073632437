"""BatchNorm for wrapped models, whose local batches are uneven and sometimes empty.

`adapt` changes a model's layers in place. `Synchronised` layers normalise by the whole global
batch, `Local` layers by each rank's own batch. `RunningStatistics` averages the running statistics
of local layers over the ranks. `Session.wrap` calls `adapt`, and the training loop calls `agree`::

    adapt(model, "sync", current)  # before DistributedDataParallel sees the model
    statistics = RunningStatistics(current, models)
    statistics.agree()  # on all ranks, after the same step
"""
