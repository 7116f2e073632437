"""Streams: data whose samples come one after the other, without a length or an index.

Each rank reads its own samples into a buffer and tells the leader their sizes. A sample stays on
the rank that has read it. The leader picks, for each step, which buffered samples each rank trains.

- `picking`: how many samples of a step each rank trains, and which of its buffer;
- `ledger`: what the leader knows of an epoch of a stream: what is buffered, and what comes next;
- `claiming`: which shards of a source a rank reads.

Nothing here does I/O.
"""
