"""Models that `torch.distributed.fsdp.fully_shard` (FSDP2) has sharded.

The script keeps the model that it sharded. `WeightedFSDP` represents it in the session: it
weights each gradient before FSDP reduces it, and `FsdpWaits` counts the ranks' waits in FSDP's
collectives as waiting. `refuse` raises for models whose gradients cannot be weighted. `kinds`
recognises models and tensors without importing FSDP, and `units` is the only module that reads
FSDP's private attributes::

    refuse(model)
    wrapped = WeightedFSDP(model, current)  # by `Session.wrap`
    begin([wrapped])  # before each step, on all ranks
"""
