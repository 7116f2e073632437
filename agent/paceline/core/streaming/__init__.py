"""Streams: data whose samples arrive one after the other, without a length or an index.

Each rank reads its own samples into a buffer and reports their sizes to the leader. A sample stays
on the rank that has read it. The leader picks, for each step, which buffered samples each rank
trains.

- `ledger`: the leader's record of a stream's epoch, which chooses the samples of the next steps;
- `reading`: which shards of a source a rank reads, and whether a shard keeps its order.
"""
