"""Streams on ranks: each rank reads its samples ahead, and the leader learns their sizes.

- `news`: what a rank tells the leader through the ranks' store, and what the leader answers;
- `reader`: the thread of a rank that reads, and the buffer from which batches are made;
- `gathering`: the leader's part: it takes in what ranks tell, until a segment can be planned.

    reader = Reader(stream, rank, world, store, seed)
    reader.begin(epoch)
    samples = reader.take([0, 1, 2])  # by how many this rank had read before
"""
