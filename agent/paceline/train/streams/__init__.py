"""Streams on ranks: each rank reads its samples ahead, and the leader learns their sizes.

- `news`: messages between ranks and the leader through the ranks' store;
- `reader`: a rank's reading thread, and the buffer from which batches are made;
- `processes`: reading in processes of a rank, which get pieces to read from that thread;
- `view`: the data set of the rank's DataLoader, whose batches come from the buffer;
- `gathering`: the leader's part: it collects the ranks' messages until a segment can be planned;
- `suiting`: refuses options that a session of a stream does not support.

    reader = Reader(stream, meeting, seed)
    reader.begin(epoch)
    samples = reader.take([0, 1, 2])  # by how many this rank had read before
"""
