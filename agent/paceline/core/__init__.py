"""Rules and arithmetic that ranks, the control plane and the simulator share. No torch, no I/O.

`terms.Terms` holds a run's validated arguments. `ledger.Ledger` keeps track of an epoch's samples
and rejects segments that do not fit. `dealing` deals samples to ranks in turn, `cost` computes the
cost of a batch, and `emulation.Emulation` computes the duration of a batch on an emulated device.
`errors` defines errors that the user can fix.
"""
