"""Models that `torch.distributed.fsdp.fully_shard` (FSDP2) has sharded.

`WeightedFSDP` represents the model in the session: it weights each gradient before FSDP reduces the
gradient. `FsdpWaits` counts the time that ranks spend in FSDP's collectives as waiting. `refuse`
raises a ValueError for models whose gradients cannot be weighted. `kinds` recognises sharded models
and tensors without importing FSDP, and `units` is the only module that reads FSDP's private
attributes::

    refuse(model)
    wrapped = WeightedFSDP(model, current)  # by `Session.wrap`
    wrapped.begin()  # before each step, on all ranks
"""
