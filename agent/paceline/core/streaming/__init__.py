"""Streams: data whose samples arrive one after the other, without a length or an index.

Each rank reads its own samples into a buffer and reports their sizes to the leader. A sample stays
on the rank that has read it. The leader picks, for each step, which buffered samples each rank
trains.

- `picking`: how many samples of a step each rank trains, and which of its buffer;
- `ledger`: the leader's record of a stream's epoch: the buffered samples and the next ones;
- `claiming`: which shards of a source a rank reads;
- `order`: detection of shards that yield their samples in a different order when read again.

This package does no I/O.
"""
