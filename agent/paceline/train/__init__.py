"""What runs in a rank. The only room of the agent, besides `node.elastic`, that imports torch.

A training script makes a `session.Session`, the user's API (`paceline.Session`). The session makes
a `loop.Loop`, which knows where training is, and a `loader.Loader`, which drives the loop. On each
rank a `plan.follower.Follower` reads the plan; on rank 0 a `plan.leader.Leader` makes it, from the
controller's `plan.proposals.Proposals` where they come in time. `ddp.WeightedDDP` weighs gradients,
`sync.gate.SyncGate` puts relaxed synchronisers into force, and `report.Emitter` sends telemetry::

    session = paceline.Session(train, global_batch=64)
    loader = session.loader()
    model = session.wrap(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters()))
    for epoch in session.epochs(10):
        for inputs, labels in loader:
            ...
"""
