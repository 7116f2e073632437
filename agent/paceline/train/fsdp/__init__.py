"""Models that `torch.distributed.fsdp.fully_shard` (FSDP2) has sharded.

The script keeps the model that it sharded. `WeightedFSDP` stands for it in the session: it weighs
each gradient before FSDP reduces it, and `Waits` counts as waiting what ranks wait for each other
in FSDP's collectives. `refuse` says what cannot be. `kinds` tells models and tensors apart without
importing FSDP, and `units` is the only module that reads FSDP's private attributes::

    refuse(model)
    wrapped = WeightedFSDP(model, current)  # by `Session.wrap`
    begin([wrapped])  # before each step, on all ranks
"""
