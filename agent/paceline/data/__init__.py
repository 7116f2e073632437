"""Data that lives on nodes, and streams.

Data on nodes: each node keeps its shard of the samples in a directory.

- `sources`: where samples come from: files, ranges of large files, HTTP;
- `directory`: the samples that a node keeps, within a bound, shared by its ranks;
- `sharded`: the data set that a script gives to `Session`;
- `keeper`: the thread that fetches ahead what a node will need, one on each node;
- `stream`: data without a length and an index, and how ranks share its source.

    data = paceline.data.Sharded(
        paceline.data.Ranges("https://store/train.bin", offsets),
        directory="/scratch/shard",
        limit_bytes=200 << 30,
        bandwidth=50e6,
        decode=decode,
    )
    session = paceline.Session(data, sizes=frames, global_batch=64)

docs/data-on-nodes.md says what moves when, docs/streams.md what streams do.
"""

from paceline.data.sharded import Sharded
from paceline.data.sources import Files, Ranges, Source
from paceline.data.stream import Stream

__all__ = ["Files", "Ranges", "Sharded", "Source", "Stream"]
