"""Streams on ranks: each rank reads its samples ahead, and the leader learns their sizes.

- `news`: what a rank tells the leader through the ranks' store, and what the leader answers;
- `reader`: the thread of a rank that reads, and the buffer from which batches are made;
- `processes`: reading in a rank's processes, which get pieces to read from that thread;
- `view`: what a DataLoader takes for the data set: batches come from the buffer;
- `gathering`: the leader's part: it takes in what ranks tell, until a segment can be planned;
- `suiting`: what a session of a stream cannot do.

    reader = Reader(stream, meeting, seed)
    reader.begin(epoch)
    samples = reader.take([0, 1, 2])  # by how many this rank had read before
"""
