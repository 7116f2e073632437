"""Streams on ranks: each rank reads samples before it needs them, and reports their sizes.

- `news`: messages between ranks and the leader through the ranks' store;
- `reader`: a rank's reading thread, and the buffer, which the rank's DataLoader reads;
- `processes`: reading in several processes of a rank, which get their claims on shards from the
  rank's reading thread;
- `gathering`: collects the ranks' messages on rank 0 until the leader can plan a segment.

    reader = StreamReader(stream, startup, seed)
    reader.begin_epoch(epoch)
    samples = reader.take([0, 1, 2])  # the first three samples that this rank has read
"""
