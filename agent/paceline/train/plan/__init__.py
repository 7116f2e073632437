"""The plan on its way to a rank: rank 0's leader adopts segments, each rank reads its shards.

`leader.Leader` adopts the controller's `proposals.Proposals`, or plans a few steps itself (coasts),
and puts each rank's shard of the segment into the ranks' store. If data is stored on nodes, `homes`
tracks which node holds which sample. `follower.Follower` yields a rank's steps; on the other ranks
its `Fetcher` reads ahead::

    leader = Leader(context, startup, start, proposals=proposals)  # on rank 0
    for step in Follower(store, rank, leader).steps(epoch):
        ...
"""
