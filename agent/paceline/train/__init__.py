"""Code that runs in each rank, within the training script's process.

Besides this package, only `node.elastic` and the adapters of frameworks (`paceline.accelerate`,
`.lightning` and `.transformers`) import torch.

A training script makes a `session.Session`, the user's API (`paceline.Session`). The session makes
a `loop.Loop` and a `loader.Loader`, which calls the `Loop` around each iteration of the script's
loop. Each optional part of training is a `feature.Feature` of the loop. On each rank a
`plan.follower.Follower` reads the plan. On rank 0 a `plan.leader.Leader` makes the plan. The
leader uses the controller's proposals (`plan.proposals.Proposals`) if they arrive in time.
`ddp.WeightedDDP` weights gradients, `sync.gate.SyncGate` applies relaxed synchronisation, and
`report.Emitter` sends telemetry::

    session = paceline.Session(train, global_batch=64)
    loader = session.loader()
    model = session.wrap(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters()))
    for epoch in session.epochs(10):
        for inputs, labels in loader:
            ...
"""
