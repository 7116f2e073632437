"""Distribution of the plan: rank 0's leader adopts segments, and each rank reads its shards.

`leader.Leader` adopts the controller's `proposals.Proposals`, or plans a few steps itself (coasts),
and puts each rank's shard of the segment into the ranks' store. If data is stored on nodes, `homes`
tracks which node stores which sample. `follower.Follower` yields a rank's steps. On ranks other
than 0, the follower's `Fetcher` reads shards before they are needed::

    leader = Leader(context, startup, start, proposals=proposals)  # on rank 0
    for step in Follower(store, rank, leader).steps(epoch):
        ...
"""
