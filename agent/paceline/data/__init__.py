"""Data sets other than plain map-style ones: data sets stored on nodes, and streams.

With data on nodes, each node keeps its shard of the samples in a directory.

- `sources`: sources of samples: files, ranges of large files, HTTP;
- `directory`: the samples on a node, within a limit, shared by its ranks;
- `sharded`: the data set that a script gives to `Session`;
- `prefetcher`: fetches samples before they are needed, in one thread on each node;
- `stream`: data without a length or an index, and how ranks divide its source among them.

    data = paceline.data.Sharded(
        paceline.data.Ranges("https://store/train.bin", offsets),
        directory="/scratch/shard",
        limit_bytes=200 << 30,
        bandwidth=50e6,
        decode=decode,
    )
    session = paceline.Session(data, sizes=frames, global_batch=64)

docs/data-on-nodes.md explains when data moves, docs/streams.md explains streams.
"""

from paceline.data.sharded import Sharded
from paceline.data.sources import Files, Ranges, Source
from paceline.data.stream import Stream

__all__ = ["Files", "Ranges", "Sharded", "Source", "Stream"]
