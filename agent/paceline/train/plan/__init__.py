"""Path of the plan to a rank: rank 0's leader adopts segments, and each rank reads its parts.

`leader.Leader` adopts the controller's `proposals.Proposals`, or coasts, and puts the parts of the
segment into the ranks' store. If data is stored on nodes, `homes` tracks which node holds which
sample. `follower.Follower` yields a rank's steps; on the other ranks its `Fetcher` reads ahead::

    leader = Leader(context, meeting, start, proposals=proposals)  # on rank 0
    for step in Follower(store, rank, leader).steps(epoch):
        ...
"""
