"""What ranks, control plane and simulator share: rules and arithmetic. No torch, no I/O.

`terms.Terms` holds a run's arguments, checked. `ledger.Ledger` keeps account of an epoch's samples
and refuses segments that do not fit. `dealing` deals samples to ranks in turn, `cost` says what a
batch costs, and `emulation.Emulation` computes how long it takes on an emulated device. Errors that
the user can mend are of `errors`. The leader, the controller and the simulator call all of these::

    ledger = Ledger(epoch=0, order=order, global_batch=64, drop_last=False)
    if (why := ledger.refusal(segment, world=4)) is None:
        ledger.use(indices)
    else:
        assignments = ledger.coast(steps=2, world=4, sizes=sizes, shares=[])
"""
